"""Contents of a checkpoint and their places: one row for each box of a tensor, and for each object."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.errors import CheckpointError

Int64s = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint32]
Numbers = tuple[int, ...]

_QUANTIZED: Final = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""Types whose tensors are more than their elements; torch ends the process if they are made of these alone."""
_FEW_ROWS: Final = 4
"""Number of boxes up to which a loop takes less time than arrays."""
DTYPE_OF: Final[Mapping[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value not in _QUANTIZED
}
"""Types of stored tensors by name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Global tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Sequence[int]
    """Rows of its boxes in the catalogue."""


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """Contents of a checkpoint. N rows, D axes of the tensor with the most, F files.

    An item is what `torch.save` writes; its payload are the elements of a box in row-major order.
    """

    tensors: Mapping[str, StoredTensor]
    """Global tensors by key."""
    objects: Mapping[str, int]
    """Row of each object, by its unique key."""
    files: tuple[str, ...]
    """Names of the files."""
    file: Int64s
    """`[N]` number of the file of each item."""
    start: Int64s
    """`[N]` first byte of each item in its file."""
    num_bytes: Int64s
    """`[N]` size of each item."""
    payload_start: Int64s
    """`[N]` first byte of each payload in its file; -1 where only the item itself says it."""
    payload_bytes: Int64s
    """`[N]` size of each payload."""
    offsets: Int64s
    """`[N, D]` first element of each box in its tensor; zeros beyond the tensor's axes."""
    sizes: Int64s
    """`[N, D]` shape of each box; ones beyond the tensor's axes."""
    first_sum: Int64s
    """`[N]` place of each payload's first checksum in `sums`; -1 where there are none."""
    sums: Sums
    """CRC-32 of each MiB of the payloads, the last one of each shorter."""
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Paths of tensors and objects in the state that torch alone has saved, by key."""

    def __len__(self) -> int:
        """Number of items."""
        return len(self.file)

    def box(self, row: int, num_axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First element and shape of the box of a row."""
        return tuple(self.offsets[row, :num_axes].tolist()), tuple(self.sizes[row, :num_axes].tolist())

    def with_aliases(self, aliases: Mapping[str, str]) -> "Catalogue":
        """Returns the contents with further names of some tensors.

        Args:
            aliases: keys that the tensors are to have, too, and the keys that they have.
        """
        named = {key: self.tensors[other] for key, other in aliases.items()}
        return replace(self, tensors={**self.tensors, **named})

    def without(self, is_removed: Callable[[str], bool]) -> "Catalogue":
        """Returns the contents without the tensors whose keys `is_removed` is true for."""
        rows: list[int] = []
        tensors = {}
        for key, tensor in self.tensors.items():
            if not is_removed(key):
                tensors[key] = replace(tensor, rows=range(len(rows), len(rows) + len(tensor.rows)))
                rows += tensor.rows
        objects = {key: len(rows) + number for number, key in enumerate(self.objects)}
        rows += self.objects.values()
        used = np.unique(self.file[rows])
        columns = {
            name: getattr(self, name)[rows]
            for name in ("start", "num_bytes", "payload_start", "payload_bytes", "offsets", "sizes", "first_sum")
        }
        return replace(
            self,
            tensors=tensors,
            objects=objects,
            files=tuple(self.files[number] for number in used.tolist()),
            file=np.searchsorted(used, self.file[rows]),
            **columns,
        )

    def overlaps(self, key: str, offset: Numbers, shape: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """Finds the boxes of a tensor that have elements of a box.

        Args:
            key: key of the tensor.
            offset: first element of the box, with an entry for each axis.
            shape: shape of the box.

        Returns:
            For each: its row, and the first element and the end of the common elements, in the global tensor.
        """
        tensor = self.tensors[key]
        num_axes = len(tensor.shape)
        if len(tensor.rows) <= _FEW_ROWS:
            return [found for row in tensor.rows for found in _common(row, *self.box(row, num_axes), offset, shape)]
        rows = np.fromiter(tensor.rows, dtype=np.int64, count=len(tensor.rows))
        starts, low = self.offsets[rows, :num_axes], np.array(offset, dtype=np.int64)
        first = np.maximum(starts, low)
        end = np.minimum(starts + self.sizes[rows, :num_axes], low + np.array(shape, dtype=np.int64))
        found = np.flatnonzero((first < end).all(axis=1))
        columns = (rows[found].tolist(), map(tuple, first[found].tolist()), map(tuple, end[found].tolist()))
        return list(zip(*columns, strict=True))


def _common(
    row: int, stored: Numbers, size: Numbers, offset: Numbers, shape: Numbers
) -> list[tuple[int, Numbers, Numbers]]:
    """Common elements of one stored box and another box, if there are any."""
    if stored == offset and size == shape:
        return [(row, offset, tuple(map(sum, zip(offset, shape, strict=True))))]
    first = tuple(map(max, zip(stored, offset, strict=True)))
    ends = zip(map(sum, zip(stored, size, strict=True)), map(sum, zip(offset, shape, strict=True)), strict=True)
    end = tuple(map(min, ends))
    return [(row, first, end)] if all(low < high for low, high in zip(first, end, strict=True)) else []


@dataclass(slots=True)
class CatalogueBuilder:
    """Collects rows of a catalogue."""

    files: dict[str, int] = field(default_factory=dict)
    _tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[int]]] = field(default_factory=dict)
    _objects: dict[str, int] = field(default_factory=dict)
    _numbers: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    _boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    _sums: list[int] = field(default_factory=list)

    def add_tensor(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Adds a global tensor, of which no box has been added."""
        require_text(key)
        found = self._tensors.setdefault(key, (dtype, shape, []))
        if found[:2] != (dtype, shape):
            raise CheckpointError(
                f"{key}: all boxes must be of one tensor, but are of {found[0]} {found[1]} and of {dtype} {shape}"
            )

    def add_box(
        self,
        key: str,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        *,
        file: str,
        start: int,
        num_bytes: int,
        payload_start: int = -1,
        payload_bytes: int = 0,
        sums: Iterable[int] | None = None,
    ) -> None:
        """Adds a box of a tensor that has been added."""
        self._tensors[key][2].append(len(self._numbers))
        self._add(file, start, num_bytes, payload_start, payload_bytes, sums)
        self._boxes.append((offset, shape))

    def add_object(
        self, unique_key: str, *, file: str, start: int, num_bytes: int, sums: Iterable[int] | None = None
    ) -> None:
        """Adds an object, whose payload is the item."""
        require_text(unique_key)
        if unique_key in self._objects:
            raise CheckpointError(f"{unique_key}: an object must be stored once, but is twice")
        self._objects[unique_key] = len(self._numbers)
        self._add(file, start, num_bytes, start, num_bytes, sums)
        self._boxes.append(((), ()))

    def _add(
        self,
        file: str,
        start: int,
        num_bytes: int,
        payload_start: int,
        payload_bytes: int,
        sums: Iterable[int] | None,
    ) -> None:
        require_text(file)
        number = self.files.setdefault(file, len(self.files))
        first = -1 if sums is None else len(self._sums)
        self._sums.extend(sums or ())
        self._numbers.append((number, start, num_bytes, payload_start, payload_bytes, first))

    def build(self) -> Catalogue:
        """Returns the catalogue."""
        columns = np.array(self._numbers, dtype=np.int64).reshape(-1, 6).T
        num_axes = max((len(shape) for _, shape in self._boxes), default=0)
        offsets, sizes = (
            np.zeros((len(self._boxes), num_axes), np.int64),
            np.ones((len(self._boxes), num_axes), np.int64),
        )
        for row, (offset, shape) in enumerate(self._boxes):
            offsets[row, : len(offset)], sizes[row, : len(shape)] = offset, shape
        tensors = {key: StoredTensor(dtype, shape, tuple(rows)) for key, (dtype, shape, rows) in self._tensors.items()}
        file, start, num_bytes, payload_start, payload_bytes, first_sum = map(np.ascontiguousarray, columns)
        return Catalogue(
            tensors=tensors,
            objects=dict(self._objects),
            files=tuple(self.files),
            file=file,
            start=start,
            num_bytes=num_bytes,
            payload_start=payload_start,
            payload_bytes=payload_bytes,
            offsets=offsets,
            sizes=sizes,
            first_sum=first_sum,
            sums=np.array(self._sums, dtype=np.uint32),
        )


EMPTY: Final = CatalogueBuilder().build()
"""Contents of nothing."""


def is_text(key: str) -> bool:
    """True for text that UTF-8 and names of files can have."""
    if key.isascii():
        return "\0" not in key
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in key


def require_text(key: str) -> None:
    """Checks a key, or the name of a file.

    Raises:
        CheckpointError: it has parts of characters, or a zero, which no other reader takes.
    """
    if not is_text(key):
        raise CheckpointError(f"keys must be text without zeros and parts of characters, found {key!r}")
