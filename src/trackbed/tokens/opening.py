"""Cached metadata of pairs, so that a pair that has not changed need not be opened again.

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
"""Pairs that are read concurrently: on a network file system each waits for a few round trips."""


class Opening(NamedTuple):
    """Metadata read when a pair is opened, with the identity of its files."""

    ends: IndexEnds
    bin_stamp: Stamp

    def to_json(self) -> list[Any]:
        """The metadata as JSON values."""
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
        """The metadata from the result of `to_json`.

        Raises:
            ValueError, TypeError: `values` is not a result of `to_json`.
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
    """Context in which pairs with `open_when_read` take their metadata from `known` instead of from their files.

    Dataset constructors have a fixed signature, which third parties extend, so the metadata are passed by context.

    Args:
        known: results of `Opening.to_json` by prefix. The caller guarantees that the files have not changed; reading a
            file that has changed still raises an error.

    Returns:
        Metadata of all other pairs opened in the block, by prefix.
    """
    noted: dict[str, Opening] = {}
    token = _OPENINGS.set(_Openings(known or {}, noted, {}))
    try:
        yield noted
    finally:
        _OPENINGS.reset(token)


def known_opening(path_prefix: str) -> Opening | None:
    """Metadata of a pair that the context was given, or None."""
    context = _OPENINGS.get()
    values = None if context is None else context.known.get(path_prefix)
    return None if values is None else Opening.from_json(values)


def note_opening(path_prefix: str, opening: Opening) -> None:
    """Record the metadata of a pair in the context."""
    context = _OPENINGS.get()
    if context is not None:
        context.noted[path_prefix] = opening


def look_ahead(path_prefixes: Iterable[str]) -> None:
    """Prefetch the metadata of pairs that are about to be opened in this context, many concurrently.

    Errors are ignored here; they are raised when the pair is opened.
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
    """Removes and returns the metadata that `look_ahead` prefetched for a pair; None if there are none."""
    context = _OPENINGS.get()
    return None if context is None else context.ahead.pop(path_prefix, None)
