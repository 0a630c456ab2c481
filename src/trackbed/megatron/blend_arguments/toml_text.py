"""Texts as a TOML file writes them."""

import json

__all__ = ["comment_text", "toml_text"]


def toml_text(value: str) -> str:
    """Returns a string as TOML writes it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def comment_text(text: str) -> str:
    """Returns a text for a comment, whose line it must not leave."""
    return "".join(char if char.isprintable() else " " for char in text)
