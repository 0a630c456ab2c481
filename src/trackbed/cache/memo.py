"""What was found out about many files, to be known again as long as none of them has changed.

A start looks at thousands of entries and pairs, most of which are as the last one left them. To ask the system for
their sizes and times takes a tenth of the time that opening and reading them takes.

Shapes: N files.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from trackbed.errors import FormatError
from trackbed.files import crc32, partial_name, publish, read_regular, write_new
from trackbed.kernels import available_threads, stamps_and_changes

__all__ = ["Memo", "read_memo", "write_memo"]

_FORMAT: Final = "trackbed-memo"
_VERSION: Final = 5
_CHUNK_FILES: Final = 1024
_IDX: Final = ".idx"
"""Ends the names of pairs' indices, which are absolute."""


class Memo(NamedTuple):
    """What a file says that may still be true."""

    content: Any
    """What was found out, as JSON values."""
    folder: str
    names: Sequence[Sequence[str]]
    """The files that it was found out about, in chunks of 1,024: in `folder`, or absolute."""
    digests: Sequence[str]
    """Of what those of each chunk were."""
    crc32: int
    """What tells it from another memo under the same name."""

    @property
    def num_chunks(self) -> int:
        """Parts that can be looked at apart."""
        return len(self.digests)

    def holds(self, chunks: Sequence[int]) -> bool:
        """Whether no file of these parts has changed. Any other process may look at the other parts."""
        names = list(chain.from_iterable(self.names[chunk] for chunk in chunks))
        stamps, changes = stamps_and_changes(self.folder, names, num_threads=available_threads())
        return list(_digests_of(names, stamps, changes[_are_indices(names)])) == [
            self.digests[chunk] for chunk in chunks
        ]


def write_memo(path: str, folder: str, files: Iterable[str], stamps: npt.NDArray[np.int64], content: Any) -> None:
    """Let the file `path` say what was found out.

    Args:
        path: in a folder of the one that is Trackbed's, which must be there; an older memo is replaced.
        folder: where the files are, or most of them.
        files: `[N]` paths of what it was found out about.
        stamps: `[N, 3]` what they were then, as `file_stamps` gives it.
        content: what was found out, as JSON values.

    Raises:
        OSError: it cannot be written.
    """
    names = [name.removeprefix(f"{folder}/") for name in files]
    indices = [name for name in names if name.endswith(_IDX)]
    _, changes = stamps_and_changes(folder, indices, num_threads=available_threads())
    digests = list(_digests_of(names, stamps, changes))
    chunks = [names[first : first + _CHUNK_FILES] for first in range(0, len(names), _CHUNK_FILES)]
    body = orjson.dumps({"names": chunks, "digests": digests, "content": content})
    head = orjson.dumps({"format": _FORMAT, "version": _VERSION, "crc32": crc32(body)})
    partials = f"{folder}/.trackbed/partial"
    for needed in (os.path.dirname(path), partials):  # noqa: PTH120
        Path(needed).mkdir(exist_ok=True)  # a folder that Megatron Core alone has written to is left as it is
    partial = f"{partials}/{partial_name(path.rpartition('/')[2])}"
    try:
        write_new(partial, head, b"\n", body, b"\n")
        publish(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def read_memo(path: str, folder: str) -> Memo | None:
    """The memo at `path`; None where there is none, or one that is damaged or of another version."""
    try:
        head, _, body = read_regular(path).partition(b"\n")
        found = crc32(body.removesuffix(b"\n"))
        if orjson.loads(head) != {"format": _FORMAT, "version": _VERSION, "crc32": found}:
            return None
        fields = orjson.loads(body)
        return Memo(fields["content"], folder, fields["names"], fields["digests"], found)
    except (OSError, FormatError, ValueError, TypeError, KeyError):
        return None


def _digests_of(names: Sequence[str], stamps: npt.NDArray[np.int64], changes: npt.NDArray[np.int64]) -> Iterator[str]:
    """Digest of what the files of each chunk were, and when those that are an `.idx` last changed in any way."""
    rows = np.column_stack([stamps, np.zeros(len(names), dtype=np.int64)])
    rows[_are_indices(names), 3] = changes
    for first in range(0, len(rows), _CHUNK_FILES):
        part = np.ascontiguousarray(rows[first : first + _CHUNK_FILES], dtype="<i8")
        yield hashlib.sha256(part.data).hexdigest()


def _are_indices(names: Sequence[str]) -> npt.NDArray[np.bool_]:
    return np.fromiter((name.endswith(_IDX) for name in names), dtype=bool, count=len(names))
