"""A batch: the tensors of several samples, in memory that is written again.

Shapes: B samples of the batch, S tokens of a sample.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trackbed.errors import ArgumentError
from trackbed.kernels import BatchArrays

__all__ = ["Batch", "BatchSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Which tensors the batches of a dataset hold."""

    length: int
    """S."""
    dataset_id: torch.dtype | None
    """Type of the dataset's number in a blend, or None where there is none."""
    has_mask: bool
    """Whether there is an attention mask."""
    shares_mask: bool
    """Whether all samples have the same one."""
    has_borders: bool
    """Whether there are `cu_seqlens` and `max_seqlen`."""

    def tensors(self, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor of a batch of B samples, in the order of a sample's keys."""
        ids = (torch.int64, (size, self.length))
        wanted = {
            "dataset_id": (self.dataset_id, (size,)),
            "tokens": ids,
            "labels": ids,
            "attention_mask": (torch.bool if self.has_mask else None, (size, 1, self.length, self.length)),
            "loss_mask": (torch.float32, (size, self.length)),
            "position_ids": ids,
            "cu_seqlens": (torch.int32 if self.has_borders else None, (size, self.length + 1)),
            "max_seqlen": (torch.int32 if self.has_borders else None, (size,)),
        }
        return {name: (dtype, shape) for name, (dtype, shape) in wanted.items() if dtype is not None}


class Batch(Mapping[str, torch.Tensor]):
    """The tensors of B samples by name, each `[B, ...]` what stacking those of the samples gives.

    A dataset writes the next batch into it where it is given as `out`. Until then its tensors stay as they are. Where
    all samples share one attention mask, it is a view of that one, and must not be written to.

    Args:
        tensors: by name.
        arrays: the same memory, where a kernel writes to it.
        spec: what they were made after.
        shared: names of those that are views of what all samples share, and that others see, too.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        arrays: BatchArrays | None = None,
        spec: BatchSpec | None = None,
        *,
        shared: Collection[str] = (),
    ) -> None:
        self._tensors = dict(tensors)
        self._arrays = arrays
        self._spec = spec
        self._shared = frozenset(shared)

    @classmethod
    def empty(
        cls, spec: BatchSpec, size: int, *, shared_mask: torch.Tensor | None = None, pinned: bool = False
    ) -> "Batch":
        """Memory for a batch of `size` samples.

        Args:
            spec: which tensors.
            size: B, at least 0.
            shared_mask: `[1, S, S]` the attention mask of all samples, where they share one.
            pinned: whether to take page-locked memory, which a GPU copies from while the program goes on.
        """
        shared = {} if shared_mask is None else {"attention_mask": shared_mask.expand(size, *shared_mask.shape)}
        own = {
            name: torch.empty(shape, dtype=dtype, pin_memory=pinned)
            for name, (dtype, shape) in spec.tensors(size).items()
            if name not in shared
        }
        arrays = {name: tensor.numpy() for name, tensor in own.items() if name != "dataset_id"}
        if "attention_mask" in arrays:
            arrays["attention_mask"] = arrays["attention_mask"].reshape(size, spec.length, spec.length)
        tensors = {name: {**own, **shared}[name] for name in spec.tensors(size)}
        return cls(tensors, BatchArrays(arrays), spec, shared=shared)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in self._tensors.items())
        return f"Batch({shapes})"

    @property
    def arrays(self) -> BatchArrays | None:
        """What a kernel writes to, or None where this batch was put together from samples."""
        return self._arrays

    @property
    def shared(self) -> frozenset[str]:
        """Names of the tensors that are views of what all samples share."""
        return self._shared

    @property
    def size(self) -> int:
        """B."""
        return len(next(iter(self._tensors.values())))

    def samples(self) -> list[dict[str, torch.Tensor]]:
        """The samples, each a view of this batch."""
        return [{name: tensor[at] for name, tensor in self._tensors.items()} for at in range(self.size)]

    def check_fits(self, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Refuse to be written with tensors of other names, types or shapes.

        Raises:
            ArgumentError: they are others; the message names the first.
        """
        if list(self) != list(wanted):
            msg = f"out must hold {', '.join(wanted)}, found {', '.join(self)}"
            raise ArgumentError(msg)
        for name, (dtype, shape) in wanted.items():
            found = self._tensors[name]
            if found.dtype != dtype or tuple(found.shape) != shape:
                msg = f"{name} of out must be {dtype} {list(shape)}, found {found.dtype} {list(found.shape)}"
                raise ArgumentError(msg)

    def is_made_after(self, spec: BatchSpec, size: int) -> bool:
        """Whether its memory is what `empty` would make."""
        return self._spec is spec and self._arrays is not None and self._arrays.size == size

    def take(self, other: "Batch") -> None:
        """Hold the memory of another batch from now on."""
        vars(self).update(vars(other))

    def copy(self, tensors: Mapping[str, Any]) -> None:
        """Hold the values of tensors that fit, in this batch's own memory where it has any."""
        for name, tensor in tensors.items():
            if name in self._shared:
                self._tensors[name] = tensor
            else:
                self._tensors[name].copy_(tensor)
        if self._shared:
            self._shared, self._spec = frozenset(), None  # its memory is not what `empty` makes any more
