"""Descriptions of datasets as written by Megatron Core; their MD5 names the index files."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from types import NoneType
from typing import Any, Final

from trackbed.datasets.start import shared

_QUOTE: Final = json.encoder.encode_basestring_ascii
_COMPACT: Final = json.JSONEncoder(default=lambda value: value.unique_identifiers).encode


def describe(identifiers: Iterable[tuple[str, Any]]) -> str:
    """Returns the description that Megatron Core writes for these identifiers, given as name and value.

    Equals `json.dumps(dict(identifiers), indent=4, default=...)`, but is joined from fields: thousands of datasets
    share most values, and indented JSON is slow to write.
    """
    fields = fields_of(identifiers)
    return f"{{\n{fields}\n}}" if fields else "{}"


def fields_of(identifiers: Iterable[tuple[str, Any]]) -> str:
    """Returns the lines of a description for these identifiers, without the enclosing braces."""
    return ",\n".join([f"    {_QUOTE(name)}: {_words_of(value)}" for name, value in identifiers])


def md5_of(description: str) -> str:
    """Returns the MD5 of a description, which names the index files."""
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
    """Returns a JSON text, indented as a value inside an object."""
    return json.dumps(json.loads(text), indent=4).replace("\n", "\n    ")


def describe_blend(identifiers: "OrderedDict[str, Any]") -> str:
    """Returns the description of a blend, whose `datasets` are given as the descriptions of its members.

    A nested description is the same text, indented: encoding thousands of them again would take longer than building
    the indices.
    """
    members = ",".join("\n        " + text.replace("\n", "\n        ") for text in identifiers["datasets"])
    text = describe({**identifiers, "datasets": []}.items())
    return text.replace('"datasets": []', f'"datasets": [{members}\n    ]', 1)
