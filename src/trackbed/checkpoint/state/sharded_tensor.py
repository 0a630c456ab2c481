"""Local boxes of global tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from trackbed.checkpoint.state.sharded_base import ReplicaId, ShardedBase
from trackbed.errors import ArgumentError, CheckpointError

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
        for axis, place, count in rank_offsets:
            if not (0 <= axis < len(box) and 0 <= place < count):
                raise CheckpointError(
                    f"{key}: rank_offsets must have an axis below {len(box)}, and a place from 0 below the number of "
                    f"boxes, found {(axis, place, count)}"
                )
            places[axis], counts[axis] = place, count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(count * size for count, size in zip(counts, box, strict=True)),
            tuple(place * size for place, size in zip(places, box, strict=True)),
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
