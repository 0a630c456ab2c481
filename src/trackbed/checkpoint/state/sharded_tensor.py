"""Entries of a state that stand for parts of global tensors, and factories that become several entries in a save."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from trackbed.errors import ArgumentError, CheckpointError

StateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]
"""Number of a copy, in one or several dimensions of parallelism. The copy with zeros alone is the main one."""


class ShardedBase(ABC):
    """Entry of a state dictionary that stands for a part of something global."""

    key: str
    """Name of the global tensor or object. The place in the state dictionary is independent of it, and not stored."""
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Checks that the fields fit together.

        Raises:
            CheckpointError: they do not.
        """

    @abstractmethod
    def without_data(self) -> Self:
        """Returns a copy whose data is None."""


def check_key(key: object) -> None:
    """Checks that a key can be stored.

    Raises:
        CheckpointError: it is no text, or has surrogates, which no encoding of text has.
    """
    if not isinstance(key, str):
        raise CheckpointError(f"key of an entry: must be text, found {key!r}, of {type(key).__name__}: give str(key)")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"key of an entry: must be text that UTF-8 can encode, found {key!r} with a lone surrogate"
        ) from error


def is_main_replica(replica_id: ReplicaId) -> bool:
    """True for 0, and for a tuple of zeros.

    Args:
        replica_id: number of a copy.

    >>> is_main_replica((0, 0)), is_main_replica((0, 1))
    (True, False)
    """
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


Numbers = tuple[int, ...]


@dataclass
class ShardedTensor(ShardedBase):
    """Part of a global tensor: a box, given by its first element and its shape. `from_rank_offsets` makes most of them.

    Args:
        key: name of the global tensor.
        data: the box, of shape `local_shape`; None for a description alone.
        dtype: type of the elements.
        local_shape: shape of the box, without prepended axes.
        global_shape: shape of the global tensor, with prepended axes.
        global_offset: first element of the box in the global tensor, with prepended axes.
        axis_fragmentations: number of boxes along each axis of a regular grid; None for boxes of any sizes.
        replica_id: 0 for one of the ranks that have this box, other numbers for its further copies.
        prepend_axis_num: number of axes before those of the box, along which the box has one element.
        allow_shape_mismatch: True if the stored tensor may have another global shape: `load` fills the rest with zeros.
        flattened_range: must be None.

    Raises:
        CheckpointError: the fields do not fit together.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: Numbers
    global_shape: Numbers
    global_offset: Numbers
    axis_fragmentations: Numbers | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that the fields fit together.

        Raises:
            CheckpointError: they do not.
        """
        if self.flattened_range is not None:
            self._refuse("flattened_range", None, self.flattened_range)
        if self.data is not None and self.data.dtype != self.dtype:
            self._refuse("the dtype of data", self.dtype, self.data.dtype)
        if self.data is not None and tuple(self.data.shape) != tuple(self.local_shape):
            self._refuse("the shape of data", tuple(self.local_shape), tuple(self.data.shape))
        num_axes = len(self.local_shape) + self.prepend_axis_num
        for name in ("global_shape", "global_offset"):
            if len(getattr(self, name)) != num_axes:
                self._refuse(f"the number of axes of {name}", num_axes, len(getattr(self, name)))
        if self.axis_fragmentations is not None:
            for offset, size in zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True):
                if size != 0 and offset % size != 0:
                    self._refuse("each offset in a regular grid", f"a multiple of {size}", offset)

    def _refuse(self, what: str, wanted: Any, found: Any) -> None:
        raise CheckpointError(f"{self.key}: {what} must be {wanted}, but is {found}")

    @property
    def has_regular_grid(self) -> bool:
        """True if all boxes of the global tensor have the same shape."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Index of the box in the global tensor: a number for each prepended axis, slices for the others."""
        first = self.prepend_axis_num
        pairs = zip(self.global_offset[first:], self.local_shape, strict=True)
        return (*self.global_offset[:first], *(slice(offset, offset + size) for offset, size in pairs))

    def local_chunk_offset_in_global(self) -> Numbers:
        """Place of the box in a regular grid of boxes; 0 along an axis where the box has no element."""
        first = self.prepend_axis_num
        pairs = zip(self.global_offset[first:], self.local_shape, strict=True)
        return (*self.global_offset[:first], *(offset // size if size else 0 for offset, size in pairs))

    def max_allowed_chunks(self) -> Numbers:
        """Number of elements of the largest box along each axis of a regular grid.

        Raises:
            CheckpointError: the grid is not regular, or its boxes do not fill the global tensor.
        """
        if self.axis_fragmentations is None:
            raise CheckpointError(f"{self.key}: the grid must be regular, but axis_fragmentations is None")
        for size, count in zip(self.global_shape, self.axis_fragmentations, strict=True):
            if not self.allow_shape_mismatch and size % count != 0:
                self._refuse("each axis of global_shape", f"a multiple of its {count} boxes", size)
        return tuple(size // count for size, count in zip(self.global_shape, self.axis_fragmentations, strict=True))

    def without_data(self) -> Self:
        """Returns a copy whose data is None."""
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> Self:
        """Describes a box of a regular grid of boxes, which all have the same shape.

        Args:
            key: name of the global tensor.
            data: the box.
            rank_offsets: `(axis, place, count)` for each axis that is cut: this is box number `place` of `count` along
                the axis. Prepended axes count first.
            replica_id: number of the copy.
            prepend_axis_num: number of axes before those of the box.
            flattened_range: must be None.
            init_kwargs: further fields.

        Raises:
            CheckpointError: a triple is out of range.
            ArgumentError: `flattened_range` is not None.
        """
        if flattened_range is not None:
            raise ArgumentError(f"{key}: flattened_range must be None, but is {flattened_range}")
        box = [*([1] * prepend_axis_num), *data.shape]
        places, counts = [0] * len(box), [1] * len(box)
        for axis, number, count in rank_offsets:
            if not (0 <= axis < len(box) and 0 <= number < count):
                raise CheckpointError(
                    f"{key}: rank_offsets must have an axis below {len(box)}, and a place from 0 below the number of "
                    f"boxes, found {(axis, number, count)}"
                )
            places[axis], counts[axis] = number, count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(count * size for count, size in zip(counts, box, strict=True)),
            tuple(number * size for number, size in zip(places, box, strict=True)),
            tuple(counts),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Makes a tensor for `data`, if that is None.

        Args:
            device: device of the tensor.
            init_fn: makes the tensor from a shape, and `dtype` and `device` by name.
        """
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[Self]:
        """Describes a part of each box, as a grid of its own: all boxes are cut in the same way.

        Args:
            dim: axis of the box.
            start: first element of the part.
            length: number of its elements.

        Returns:
            One description.

        Raises:
            CheckpointError: the box has no data, or does not lie in a regular grid along the axis.
        """
        axis, size = dim + self.prepend_axis_num, self.local_shape[dim]
        if self.data is None or size == 0 or self.global_shape[axis] % size or self.global_offset[axis] % size:
            raise CheckpointError(
                f"{self.key}: a box that is narrowed must have data, and lie in a regular grid, but does not"
            )
        data = self.data.narrow(dim, start, length)
        shape, offset = list(self.global_shape), list(self.global_offset)
        shape[axis], offset[axis] = shape[axis] // size * length, offset[axis] // size * length
        narrowed = replace(
            self, data=data, local_shape=tuple(data.shape), global_shape=tuple(shape), global_offset=tuple(offset)
        )
        return [narrowed]


Path = tuple[Any, ...]
Builder = Callable[..., Any]
Merger = Callable[[Any], Any]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Tensor that is saved as a state dictionary of others.

    An optimizer uses the factory of a parameter for the state of the parameter too, with another key and other data; so
    the result must depend on the arguments of `build_fn` alone.

    Args:
        key: name, for `build_fn`.
        data: tensor.
        build_fn: makes a state dictionary of `key, data, replica_id, flattened_range`.
        merge_fn: makes the tensor of that state dictionary with loaded values.
        replica_id: number of the copy.
        flattened_range: passed on to `build_fn`.
    """

    key: str
    data: torch.Tensor | None
    build_fn: Builder
    merge_fn: Merger
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Returns the state dictionary that is saved or loaded in the place of the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Does nothing: the entries that are built check themselves."""

    def without_data(self) -> Self:
        """Returns a copy whose data is None."""
        return replace(self, data=None)


def apply_factory_merges(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Replaces what factories built by the values that they merge from it, and returns the result.

    Args:
        x1: loaded state dictionary, which is changed.
        x2: factories, at the same places; a list of `x1` may be a dictionary by position here.
        key: path of both, for errors.

    Raises:
        ValueError: `x1` lacks a place of `x2`; the message has its path.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if isinstance(x2, list) and isinstance(x1, list) and len(x1) == len(x2):
        x2 = dict(enumerate(x2))
    if not isinstance(x2, dict) or not isinstance(x1, dict | list):
        raise ValueError(f"state: what was loaded at {key} must have the structure of its factories, but does not")  # noqa: TRY004  Megatron Core's type
    for name, below in x2.items():
        is_there = name in x1 if isinstance(x1, dict) else isinstance(name, int) and 0 <= name < len(x1)
        if not is_there:
            raise ValueError(
                f"state: what was loaded must have a value at {(*key, name)}, which a factory built, but does not"
            )
        x1[name] = apply_factory_merges(x1[name], below, (*key, name))
    return x1
