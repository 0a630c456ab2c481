"""What opening a pair finds out: known of a pair that has not changed, it need not be opened again.

A start opens thousands of pairs and reads most of them much later, or never.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from trackbed.files import Stamp
from trackbed.kernels import file_stamps
from trackbed.tokens.dtype import DType
from trackbed.tokens.format import Header, IndexEnds, read_ends
from trackbed.tokens.paths import get_bin_path, get_idx_path

__all__ = ["Opening", "known_opening", "look_ahead", "note_opening", "openings", "seen_ahead"]

_NUM_THREADS: Final = 8
"""Pairs that are looked at at once: on a network file system each waits for a few answers."""


class Opening(NamedTuple):
    """What was read of a pair, and which files it was."""

    ends: IndexEnds
    bin_stamp: Stamp

    def to_json(self) -> list[Any]:
        """The same as JSON values."""
        ends = self.ends
        code = DType.code_from_dtype(ends.header.dtype)
        counts = [code, ends.header.sequence_count, ends.header.document_count]
        return [
            *counts,
            ends.sha256,
            ends.last_length,
            ends.last_pointer,
            ends.last_border,
            *ends.stamp,
            *self.bin_stamp,
        ]

    @classmethod
    def from_json(cls, values: list[Any]) -> "Opening":
        """What `to_json` gave.

        Raises:
            ValueError, TypeError: these are no such values.
        """
        code, sequences, borders, sha256, last_length, last_pointer, last_border, *stamps = values
        index_stamp, bin_stamp = Stamp(*stamps[:3]), Stamp(*stamps[3:])
        header = Header(DType.dtype_from_code(code), sequences, borders)
        ends = IndexEnds(header, index_stamp.size_bytes, sha256, last_length, last_pointer, last_border, index_stamp)
        return cls(ends, bin_stamp)


class _Openings(NamedTuple):
    known: Mapping[str, list[Any]]
    noted: dict[str, Opening]
    ahead: dict[str, Opening]


_OPENINGS: ContextVar[_Openings | None] = ContextVar("openings", default=None)


@contextlib.contextmanager
def openings(known: Mapping[str, list[Any]] | None = None) -> Iterator[dict[str, Opening]]:
    """Inside the block, pairs that open when they are read are not looked at where that is known already.

    Dataset constructors have a fixed signature, which third parties extend; this is how the one who calls them says
    what he knows.

    Args:
        known: by prefix, what `Opening.to_json` gave. The caller vouches that the files have not changed; what is read
            of one that has is an error all the same.

    Returns:
        What was found out of all others, by prefix.
    """
    noted: dict[str, Opening] = {}
    token = _OPENINGS.set(_Openings(known or {}, noted, {}))
    try:
        yield noted
    finally:
        _OPENINGS.reset(token)


def known_opening(path_prefix: str) -> Opening | None:
    """What the context knows of a pair."""
    context = _OPENINGS.get()
    values = None if context is None else context.known.get(path_prefix)
    return None if values is None else Opening.from_json(values)


def note_opening(path_prefix: str, opening: Opening) -> None:
    """Tell the context what was found out of a pair."""
    context = _OPENINGS.get()
    if context is not None:
        context.noted[path_prefix] = opening


def look_ahead(path_prefixes: Iterable[str]) -> None:
    """Look at pairs that are about to be opened when they are read, in this context: at many at once.

    What is wrong with one, or is no pair, is left to whoever opens it.
    """
    context = _OPENINGS.get()
    if context is None:
        return
    prefixes = [prefix for prefix in dict.fromkeys(path_prefixes) if prefix not in context.known]
    ends = read_ends([get_idx_path(prefix) for prefix in prefixes], num_threads=_NUM_THREADS)
    stamps = file_stamps(".", [get_bin_path(prefix) for prefix in prefixes], num_threads=_NUM_THREADS).tolist()
    for prefix, found, stamp in zip(prefixes, ends, stamps, strict=True):
        if found is not None and stamp[1] >= 0:
            context.ahead[prefix] = Opening(found, Stamp(*stamp))


def seen_ahead(path_prefix: str) -> Opening | None:
    """What `look_ahead` saw of a pair, once: of one that is opened again later, nothing."""
    context = _OPENINGS.get()
    return None if context is None else context.ahead.pop(path_prefix, None)
