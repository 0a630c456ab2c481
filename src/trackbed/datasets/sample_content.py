"""Everything that decides the samples of a dataset, as text without folders: saved positions are compared by it.

The text also has the beginning of the fingerprint that it belongs to: of a state that was put together from two, it is
not believed.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from trackbed.cache.entry import differences

__all__ = ["content_text", "find_changes", "joined", "plain", "read_content"]

_OF: Final = "fingerprint"
_DIGITS: Final = 16
_SIZES: Final = {"size", "num_samples"}
_TOKENS: Final = "tokens"
_MOST_CHARACTERS: Final = 400


def content_text(content: Mapping[str, Any], *, fingerprint: str) -> str:
    """Returns values by name as JSON, in which a digest stands for a long value.

    >>> content_text({"seed": 1, "weights": [0.5, 0.5]}, fingerprint="0123456789abcdef0123")
    '{"fingerprint": "0123456789abcdef", "seed": 1, "weights": [0.5, 0.5]}'
    """
    values = {name: _brief(value) for name, value in content.items()}
    return json.dumps({_OF: fingerprint[:_DIGITS], **values})


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


def read_content(text: object, *, fingerprint: object) -> dict[str, Any] | None:
    """Returns the values of a text of `content_text`; None if it is none, or belongs to another fingerprint."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    is_content = (
        isinstance(found, dict) and isinstance(fingerprint, str) and found.pop(_OF, "") == fingerprint[:_DIGITS]
    )
    return found if is_content else None


def find_changes(saved: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns what differs between two contents, as `name: saved, now found`; nothing if nothing does.

    The number of samples may differ in the order "instant", where it does not change the first ones.
    """
    ignored = _SIZES if saved.get("order") == found.get("order") == "instant" else set()
    if not (saved.get(_TOKENS) and found.get(_TOKENS)):
        ignored = {*ignored, _TOKENS}  # of objects in stores, which have tags instead
    old, new = ({name: value for name, value in one.items() if name not in ignored} for one in (saved, found))
    return differences(old, new)


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
