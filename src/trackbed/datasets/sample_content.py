"""What decides the samples of a dataset, as text without paths: a saved position has it, so that a change is named."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from trackbed.cache.entry import differences

__all__ = ["content_text", "find_changes", "joined", "plain"]

_MOST_CHARACTERS: Final = 400


def content_text(content: Mapping[str, Any]) -> str:
    """Returns values by name as JSON, in which a digest stands for a long value.

    >>> content_text({"seed": 1, "weights": [0.5, 0.5]})
    '{"seed": 1, "weights": [0.5, 0.5]}'
    """
    return json.dumps({name: _brief(value) for name, value in content.items()})


def joined(contents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values of several datasets by name: one where all have the same, else a list.

    >>> joined([{"seed": 1, "num_samples": 5}, {"seed": 1, "num_samples": 6}])
    {'seed': 1, 'num_samples': [5, 6]}
    """
    columns: dict[str, list[Any]] = {}
    num_contents = 0
    for content in contents:
        num_contents += 1
        for name, value in content.items():
            columns.setdefault(name, []).append(value)
    return {name: values[0] if values.count(values[0]) == num_contents else values for name, values in columns.items()}


def find_changes(saved: object, found: str) -> str | None:
    """Returns what differs between two texts of `content_text`: `name: saved, now found`; None if nothing does."""
    try:
        old = json.loads(saved) if isinstance(saved, str) else None
    except ValueError:
        old = None
    return differences(old if isinstance(old, dict) else {}, json.loads(found)) or None


def plain(value: Any) -> Any:
    """Converts a value that JSON lacks: numbers of NumPy, tokenizers, and other objects to the name of their class."""
    if hasattr(value, "item"):
        return value.item()
    identifiers = getattr(value, "unique_identifiers", None)
    return dict(identifiers) if identifiers is not None else type(value).__name__


def _brief(value: Any) -> Any:
    text = json.dumps(value, default=plain)
    if len(text) <= _MOST_CHARACTERS:
        return json.loads(text)
    return f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:32]}"
