"""What datasets are, in Megatron Core's words: texts that name their files."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import NoneType
from typing import Any, Final, TypeVar

__all__ = ["alike", "being_alike", "describe", "describe_blend", "fields_of", "md5_of"]

_Made = TypeVar("_Made")

_QUOTE: Final = json.encoder.encode_basestring_ascii
_COMPACT: Final = json.JSONEncoder(default=lambda value: value.unique_identifiers).encode

_ALIKE: ContextVar[dict[tuple[object, ...], tuple[tuple[object, ...], Any]] | None] = ContextVar("alike", default=None)


@contextmanager
def being_alike() -> Iterator[None]:
    """Inside the block nobody changes what datasets share, such as a tokenizer: `alike` makes things once."""
    token = _ALIKE.set({})
    try:
        yield
    finally:
        _ALIKE.reset(token)


def alike(what: str, make: Callable[[], _Made], *about: object) -> _Made:
    """What `make` gives, which follows from these objects; inside `being_alike` made once for the same ones.

    Args:
        what: tells it from other things that follow from them.
        make: called without arguments.
        about: nothing else decides what is made.
    """
    made = _ALIKE.get()
    if made is None:
        return make()
    key = (what, *map(id, about))
    if key not in made:
        made[key] = about, make()  # they are kept, so that no other object takes their number
    found: _Made = made[key][1]
    return found


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
    return alike("words", lambda: _indented(_COMPACT(value)), value)


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
