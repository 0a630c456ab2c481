"""The decisions that an index was built by, and their SHA-256."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["Decisions", "canonical", "differences", "fingerprint"]

_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

Decisions = Mapping[str, Any]
"""Everything that decides the bytes of an entry, as JSON values by name."""

_WORDS: Final = {
    "data": "other files, as of a corpus that was made again",
    "datasets": "other ones, or of other data",
}
"""Descriptions of decisions whose values are checksums and counts of bytes."""


def canonical(decisions: Decisions) -> str:
    """Returns the JSON text of decisions, the same for equal ones: keys sorted, no spaces, doubles in full.

    >>> canonical({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    return _CANONICAL(decisions)


def fingerprint(decisions: Decisions) -> str:
    """Returns 64 hexadecimal digits, which differ where the decisions do.

    >>> fingerprint({"seed": 1})[:8], fingerprint({"seed": 2})[:8]
    ('fbe47f6d', 'a61e75dc')
    """
    return hashlib.sha256(canonical(decisions).encode()).hexdigest()


def differences(old: Decisions, new: Decisions) -> str:
    """Returns a description of each difference: `name: old, now new`.

    >>> differences({"seed": 1, "size": 5}, {"seed": 2, "size": 5})
    'seed: 1, now 2'
    """
    names = sorted({*old, *new})
    return "; ".join(
        f"{name}: {_WORDS.get(name) or f'{_short(old.get(name))}, now {_short(new.get(name))}'}"
        for name in names
        if old.get(name) != new.get(name)
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
