"""The side file: what a checkpoint holds, where, and the checksums of all of it.

    magic, length of the description | description in JSON | rows of int64 | checksums of uint32 | CRC-32 of it all

Rows of a tensor follow each other, in the order of the tensors; those of objects come last. Numbers are little-endian.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from trackbed.checkpoint.format.catalogue import DTYPE_OF, Catalogue, StoredTensor
from trackbed.checkpoint.format.side_check import check_description, check_rows
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32

__all__ = ["SIDE_NAME", "SideFile", "StoredFile"]

SIDE_NAME: Final = "trackbed.extents"
_MAGIC: Final = b"TRACKBED EXTENTS"
_VERSION: Final = 1
_HEAD_BYTES: Final = len(_MAGIC) + 8
_COLUMNS: Final = ("file", "start", "num_bytes", "payload_start", "payload_bytes", "first_sum")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and checksum of a file."""

    num_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class SideFile:
    """Contents of a side file."""

    save_id: str
    """Name of the save, which no other has."""
    files: Mapping[str, StoredFile]
    """All other files of the checkpoint by name."""
    catalogue: Catalogue

    def encode(self) -> bytes:
        """Serializes the contents."""
        catalogue = self.catalogue
        order = [row for tensor in catalogue.tensors.values() for row in tensor.rows] + list(catalogue.objects.values())
        head = orjson.dumps(
            {
                "version": _VERSION,
                "save_id": self.save_id,
                "files": [[name, found.num_bytes, found.crc] for name, found in self.files.items()],
                "data_files": catalogue.files,
                "tensors": [
                    [key, str(tensor.dtype).removeprefix("torch."), tensor.shape, len(tensor.rows)]
                    for key, tensor in catalogue.tensors.items()
                ],
                "objects": list(catalogue.objects),
                "rows": len(catalogue),
                "axes": catalogue.offsets.shape[1],
                "sums": len(catalogue.sums),
            }
        )
        columns = [getattr(catalogue, name)[order].astype("<i8").tobytes() for name in _COLUMNS]
        boxes = [box[order].astype("<i8").tobytes() for box in (catalogue.offsets, catalogue.sizes)]
        length = len(head).to_bytes(8, "little")
        body = b"".join([_MAGIC, length, head, *columns, *boxes, catalogue.sums.astype("<u4").tobytes()])
        return body + crc32(body).to_bytes(4, "little")

    @classmethod
    def decode(cls, content: bytes) -> "SideFile":
        """Parses a side file.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        if len(content) < _HEAD_BYTES + 4 or crc32(memoryview(content)[:-4]) != int.from_bytes(content[-4:], "little"):
            msg = f"{SIDE_NAME}: must end in the checksum of its {len(content):,} bytes, but does not: it is damaged"
            raise CheckpointError(msg)
        try:
            return cls._parse(memoryview(content)[:-4])
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            msg = f"{SIDE_NAME}: must be a side file of version {_VERSION}, but cannot be read: {error}"
            raise CheckpointError(msg) from error

    @classmethod
    def _parse(cls, view: memoryview) -> "SideFile":
        if bytes(view[: len(_MAGIC)]) != _MAGIC:
            msg = f"{SIDE_NAME}: must begin with {_MAGIC!r}, but begins with {bytes(view[: len(_MAGIC)])!r}"
            raise CheckpointError(msg)
        end = _HEAD_BYTES + int.from_bytes(view[len(_MAGIC) : _HEAD_BYTES], "little")
        head: dict[str, Any] = orjson.loads(view[_HEAD_BYTES:end])
        if head["version"] != _VERSION:
            msg = f"{SIDE_NAME}: must be of version {_VERSION}, but is of {head['version']}: use a newer Trackbed"
            raise CheckpointError(msg)
        check_description(head)
        count, axes = head["rows"], head["axes"]
        numbers = np.frombuffer(view[end : end + 8 * count * (len(_COLUMNS) + 2 * axes)], dtype="<i8").astype(np.int64)
        columns = numbers[: len(_COLUMNS) * count].reshape(len(_COLUMNS), count)
        offsets, sizes = numbers[len(_COLUMNS) * count :].reshape(2, count, axes)
        sums = np.frombuffer(view[end + numbers.nbytes :], dtype="<u4").astype(np.uint32)
        tensors, row = {}, 0
        for key, dtype, shape, num_rows in head["tensors"]:
            tensors[key] = StoredTensor(DTYPE_OF[dtype], tuple(shape), range(row, row + num_rows))
            row += num_rows
        objects = {key: row + number for number, key in enumerate(head["objects"])}
        if row + len(objects) != count or len(sums) != head["sums"]:
            msg = f"{SIDE_NAME}: must have {count:,} rows, but describes {row + len(objects):,}"
            raise CheckpointError(msg)
        catalogue = Catalogue(
            tensors=tensors,
            objects=objects,
            files=tuple(head["data_files"]),
            **dict(zip(_COLUMNS, columns, strict=True)),
            offsets=offsets,
            sizes=sizes,
            sums=sums,
        )
        check_rows(catalogue)
        files = {name: StoredFile(num_bytes, crc) for name, num_bytes, crc in head["files"]}
        return cls(head["save_id"], files, catalogue)
