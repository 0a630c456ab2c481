"""Images that go with texts, in the format of Megatron's `preprocess_mmdata.py`.

A document has two sequences: the tokens of the text, with mode 0, and the file of the image, with mode 1: the number of
padding bytes, then the bytes of the file, padded with zeros to a multiple of 4, as little-endian int32.

Shapes: T tokens of a text, W words of 4 bytes of an image.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import open_regular
from trackbed.preprocess.config import ImagesConfig
from trackbed.preprocess.record_error import RecordError

IMAGE_CHUNK_BYTES: Final = 8 << 10
"""Maximum input per chunk if records have images, which may be thousands of times as large as their records."""

_WORD_BYTES: Final = 4
_BY_THE_RECORD: Final = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
}
"""Errors of a file that a record should not have named, unlike errors of a disk or network."""


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Folder of images, opened; picklable, so that it can be sent to workers."""

    config: ImagesConfig
    root: Path
    """Path of the folder without symbolic links."""
    max_bytes: int
    """Maximum size of an image."""

    @classmethod
    def open(cls, config: ImagesConfig, *, max_bytes: int) -> "ImageFolder":
        """Looks up the folder."""
        if not config.folder.is_dir():
            raise ArgumentError(f"{config.folder}: the images must be in a folder, found {_kind(config.folder)}")
        return cls(config, config.folder.resolve(), max_bytes)

    def read(self, name: str) -> npt.NDArray[np.int32]:
        """Reads the image with the given path below the folder.

        Returns:
            `[1 + W]` number of padding bytes, then the words of the file.
        """
        path = self._locate(name)
        try:
            descriptor, size = open_regular(path)
        except FormatError as error:
            raise RecordError(str(error)) from None
        except OSError as error:
            raise self._as_record_error(name, error) from error
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if size > self.max_bytes:
                raise RecordError(f"the image {name!r} must have at most {self.max_bytes:,} bytes, found {size:,}")
            padding = -size % _WORD_BYTES
            words = np.zeros(1 + (size + padding) // _WORD_BYTES, dtype="<i4")
            words[0] = padding
            view = words[1:].view(np.uint8).data[:size]
            while view and (count := file.readinto(view)):
                view = view[count:]
            if len(view) or file.read(1):
                raise RecordError(
                    f"the image {name!r} must keep its {size:,} bytes while it is read, found another size"
                )
        return words

    def _locate(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or "\0" in name or name.startswith("/") or ".." in parts:
            raise RecordError(f"the image must be the path of a file below {self.config.folder}, found {name!r}")
        try:
            path = Path(os.path.realpath(self.root / name, strict=True))
        except OSError as error:
            raise self._as_record_error(name, error) from error
        if not path.is_relative_to(self.root):
            raise RecordError(f"the image {name!r} must be a file below {self.config.folder}, found a link to {path}")
        return path

    def _as_record_error(self, name: str, error: OSError) -> Exception:
        if error.errno not in _BY_THE_RECORD:
            return error
        return RecordError(f"the image {name!r} must be a file below {self.config.folder}, found: {error.strerror}")


def fit_text(tokens: npt.NDArray[Any], *, pad_length: int, eod: int | None) -> npt.NDArray[Any]:
    """Cuts a text, or fills it with `eod`, to a number of tokens, as Megatron's tool does.

    Args:
        tokens: `[T]` tokens of the text; without tokens it stays empty.
        pad_length: number of tokens of the result, at least 1.
        eod: end-of-document token; None to leave the text as it is.

    >>> fit_text(np.array([1, 2, 3]), pad_length=5, eod=9).tolist()
    [1, 2, 3, 9, 9]
    """
    if eod is None or len(tokens) == 0:
        return tokens
    fitted = np.full(pad_length, eod, dtype=tokens.dtype)
    fitted[: len(tokens)] = tokens[:pad_length]
    return fitted


def image_modes(num_documents: int) -> npt.NDArray[np.int8]:
    """Returns the `[2 * num_documents]` modes of the sequences: 0 for a text, 1 for an image."""
    return np.tile(np.array([0, 1], dtype=np.int8), num_documents)


def _kind(path: Path) -> str:
    return "something else" if path.exists() else "nothing"
