"""Descriptions of datasets, in Megatron Core's words: texts that name their files."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from types import NoneType
from typing import Any, Final

from trackbed.datasets.start import shared

__all__ = ["describe", "describe_blend", "fields_of", "md5_of"]

_QUOTE: Final = json.encoder.encode_basestring_ascii
_COMPACT: Final = json.JSONEncoder(default=lambda value: value.unique_identifiers).encode


def describe(identifiers: Iterable[tuple[str, Any]]) -> str:
    """The description that Megatron Core writes of these identifiers, by name.

    It is `json.dumps(dict(identifiers), indent=4, default=...)`, put together by field: thousands of datasets share
    most values, and indented JSON is slow to write.
    """
    fields = fields_of(identifiers)
    return f"{{\n{fields}\n}}" if fields else "{}"


def fields_of(identifiers: Iterable[tuple[str, Any]]) -> str:
    """The lines that stand for these identifiers in a description."""
    return ",\n".join([f"    {_QUOTE(name)}: {_words_of(value)}" for name, value in identifiers])


def md5_of(description: str) -> str:
    """What names the files of whatever is described so."""
    return hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()


def _words_of(value: Any) -> str:
    if type(value) is str:
        return _QUOTE(value)
    if type(value) is int:
        return repr(value)
    if isinstance(value, (str, int, float, NoneType)):
        return json.dumps(value)
    return shared("words", lambda: _indented(_COMPACT(value)), value)


@lru_cache(maxsize=256)
def _indented(text: str) -> str:
    """A JSON text, spread over lines as it is inside an object."""
    return json.dumps(json.loads(text), indent=4).replace("\n", "\n    ")


def describe_blend(identifiers: "OrderedDict[str, Any]") -> str:
    """`describe` for a blend, whose `datasets` are given as the descriptions that their members have already.

    A description inside another one is the same text, indented: to write thousands of them twice would take
    longer than to build what they describe.
    """
    members = ",".join("\n        " + text.replace("\n", "\n        ") for text in identifiers["datasets"])
    text = describe({**identifiers, "datasets": []}.items())
    return text.replace('"datasets": []', f'"datasets": [{members}\n    ]', 1)
