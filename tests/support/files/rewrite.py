"""Replacement of a file as a whole, which no reader sees in parts."""


def rewrite(path, text):
    """Gives a file another text."""
    partial = path.with_suffix(".new")
    partial.write_text(text)
    partial.replace(path)
