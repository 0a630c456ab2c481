"""The side file: what a checkpoint holds, where, and the checksums of all of it.

    magic, length of the description | description in JSON | rows of int64 | checksums of uint32 | CRC-32 of it all

Rows of a tensor follow each other, in the order of the tensors; those of objects come last. Numbers are little-endian.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import orjson

from trackbed.checkpoint.format.catalogue import DTYPE_OF, Catalogue, StoredTensor
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32

SIDE_NAME: Final = "trackbed.extents"
SUM_BYTES: Final = 1 << 20
"""Bytes of a payload that have a checksum of their own."""
_MAGIC: Final = b"TRACKBED EXTENTS"
_VERSION: Final = 1
_HEAD_BYTES: Final = len(_MAGIC) + 8
_COLUMNS: Final = ("file", "start", "num_bytes", "payload_start", "payload_bytes", "first_sum")
_END: Final = 1 << 62
"""Sizes and places are below this, so that sums of two of them are numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Size and checksum of a file."""

    num_bytes: int
    crc: int


class Described(NamedTuple):
    """Small files that describe the others of a checkpoint."""

    contents: Mapping[str, bytes]
    """The small files by name, the side file among them."""
    files: Mapping[str, FileChecksum]
    """Sizes and checksums of all files but the side file."""


@dataclass(frozen=True, slots=True)
class SideFile:
    """Contents of a side file."""

    save_id: str
    """Name of the save, which no other has."""
    files: Mapping[str, FileChecksum]
    """All other files of the checkpoint by name."""
    catalogue: Catalogue

    def encode(self) -> bytes:
        """Serializes the contents."""
        catalogue = self.catalogue
        # Rows of a tensor with several keys are there for each of them.
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
                "rows": len(order),
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
            raise CheckpointError(
                f"{SIDE_NAME}: must end in the checksum of its {len(content):,} bytes, but does not: it is damaged"
            )
        try:
            return cls._parse(memoryview(content)[:-4])
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise CheckpointError(
                f"{SIDE_NAME}: must be a side file of version {_VERSION}, but cannot be read: {error}"
            ) from error

    @classmethod
    def _parse(cls, view: memoryview) -> "SideFile":
        if bytes(view[: len(_MAGIC)]) != _MAGIC:
            raise CheckpointError(
                f"{SIDE_NAME}: must begin with {_MAGIC!r}, but begins with {bytes(view[: len(_MAGIC)])!r}"
            )
        end = _HEAD_BYTES + int.from_bytes(view[len(_MAGIC) : _HEAD_BYTES], "little")
        head: dict[str, Any] = orjson.loads(view[_HEAD_BYTES:end])
        if head["version"] != _VERSION:
            raise CheckpointError(
                f"{SIDE_NAME}: must be of version {_VERSION}, but is of {head['version']}: use a newer Trackbed"
            )
        _check_description(head)
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
            raise CheckpointError(f"{SIDE_NAME}: must have {count:,} rows, but describes {row + len(objects):,}")
        catalogue = Catalogue(
            tensors=tensors,
            objects=objects,
            files=tuple(head["data_files"]),
            file=columns[0],
            start=columns[1],
            num_bytes=columns[2],
            payload_start=columns[3],
            payload_bytes=columns[4],
            first_sum=columns[5],
            offsets=offsets,
            sizes=sizes,
            sums=sums,
        )
        _check_rows(catalogue)
        files = {name: FileChecksum(num_bytes, crc) for name, num_bytes, crc in head["files"]}
        return cls(head["save_id"], files, catalogue)


# The checksum of a side file shows that it is whole, not that it was written in good faith: numbers from it become
# sizes of arrays and places in files, so all are checked before they are used.


def _check_description(head: Mapping[str, Any]) -> None:
    """Checks the types of what a side file describes, and that its files lie in its folder."""
    if not isinstance(head["save_id"], str):
        _fail("save_id must be text", head["save_id"])
    for name in (*(_three(entry)[0] for entry in head["files"]), *head["data_files"]):
        is_inside = isinstance(name, str) and name and "\0" not in name and not name.startswith("/")
        if not is_inside or ".." in name.split("/"):
            _fail("files must be names in the folder of the checkpoint", name)
    for _, num_bytes, crc in head["files"]:
        _check_counts((num_bytes, crc))
    keys = [entry[0] for entry in head["tensors"]] + head["objects"]
    if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        _fail(
            "keys must be text, each there once", next((key for key in keys if not isinstance(key, str)), "one twice")
        )
    for _, dtype, shape, num_rows in head["tensors"]:
        if dtype not in DTYPE_OF:
            _fail("types must be names of types that can be loaded", dtype)
        _check_counts((*shape, num_rows))
    _check_counts((head["rows"], head["axes"], head["sums"]))


def _three(entry: Any) -> Any:
    if not isinstance(entry, list) or len(entry) != 3:
        _fail("each file must have name, size and checksum", entry)
    return entry


def _check_counts(values: tuple[Any, ...]) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < _END:
            _fail("sizes must be whole numbers from 0", value)


def _check_rows(catalogue: Catalogue) -> None:
    """Checks the places of the items: those of checksums, and boxes that lie in their tensors."""
    counts = (catalogue.start, catalogue.num_bytes, catalogue.payload_bytes, catalogue.offsets, catalogue.sizes)
    if any(len(column) and (column.min() < 0 or column.max() >= _END) for column in counts if column.size):
        _fail("places and sizes must be whole numbers from 0", "another")
    file, first = catalogue.file, catalogue.first_sum
    if len(file) and not 0 <= file.min() <= file.max() < len(catalogue.files):
        _fail(f"numbers of files must be below {len(catalogue.files)}", int(file.max()))
    num_sums = np.where(first < 0, 0, -(-catalogue.payload_bytes // SUM_BYTES))
    if len(first) and (
        min(first.min(), catalogue.payload_start.min()) < -1 or (first + num_sums).max() > len(catalogue.sums)
    ):
        _fail(f"checksums must be among {len(catalogue.sums):,}", "one beyond")
    _check_boxes(catalogue)


def _check_boxes(catalogue: Catalogue) -> None:
    stored = [tensor for tensor in catalogue.tensors.values() if len(tensor.rows)]
    num_axes = catalogue.offsets.shape[1]
    if any(len(tensor.shape) > num_axes for tensor in stored):
        _fail(f"tensors must have at most {num_axes} axes", "one of more")
    counts = [len(tensor.rows) for tensor in stored]
    shapes = np.array([(*tensor.shape, *[1] * (num_axes - len(tensor.shape))) for tensor in stored], dtype=np.int64)
    ends = np.repeat(shapes.reshape(len(stored), num_axes), counts, axis=0)
    rows = slice(0, sum(counts))
    if (catalogue.offsets[rows] + catalogue.sizes[rows] > ends).any():
        _fail("each box must lie within its tensor", "one beyond")
    item_bytes = np.repeat([tensor.dtype.itemsize for tensor in stored], counts)
    wanted = catalogue.sizes[rows].prod(axis=1, dtype=np.float64) * item_bytes
    if ((catalogue.payload_bytes[rows] != wanted) & (catalogue.payload_start[rows] >= 0)).any():
        _fail("each payload must have the bytes of its box", "another size")


def _fail(what: str, found: object) -> NoReturn:
    raise ValueError(f"{what}, found {str(found)[:80]!r}")
