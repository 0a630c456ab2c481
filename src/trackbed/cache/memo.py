"""What was found out about many files, to be known again as long as none of them has changed.

A start looks at thousands of entries and pairs, most of which are as the last one left them. To ask the system for
their sizes and times takes a tenth of the time that opening and reading them takes.

Shapes: N files.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from trackbed.errors import FormatError
from trackbed.files import changed_ns, crc32, partial_name, publish, read_regular, write_new
from trackbed.kernels import available_threads, file_stamps

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
        stamps = file_stamps(self.folder, names, num_threads=available_threads())
        parts = np.split(stamps, range(_CHUNK_FILES, len(stamps), _CHUNK_FILES)) if chunks else []
        found = [_digest(part, self.names[chunk], self.folder) for part, chunk in zip(parts, chunks, strict=True)]
        return found == [self.digests[chunk] for chunk in chunks]


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
    parts = [stamps[first : first + _CHUNK_FILES] for first in range(0, len(stamps), _CHUNK_FILES)]
    names = list(_chunks_of(files, folder))
    digests = [_digest(part, some, folder) for part, some in zip(parts, names, strict=True)]
    body = orjson.dumps({"names": names, "digests": digests, "content": content})
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


def _chunks_of(files: Iterable[str], folder: str) -> Iterator[list[str]]:
    """The names of each chunk of files."""
    start, rest = f"{folder}/", iter(files)
    while names := [name.removeprefix(start) for name in islice(rest, _CHUNK_FILES)]:
        yield names


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


def _digest(stamps: npt.NDArray[np.int64], names: Sequence[str], folder: str) -> str:
    """Digest of what files were; of `.idx` files with the time of their last change, which cannot be set."""
    changes = [changed_ns(os.path.join(folder, name)) for name in names if name.endswith(_IDX)]  # noqa: PTH118
    found = hashlib.sha256(np.ascontiguousarray(stamps, dtype="<i8").data)
    found.update(np.array(changes, dtype="<i8").data)
    return found.hexdigest()
