"""Batches: the tensors of several samples, in reusable memory.

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
    """Specification of the tensors in the batches of a dataset."""

    length: int
    """S."""
    dataset_id: torch.dtype | None
    """Dtype of the dataset's number in a blend; None without a blend."""
    has_mask: bool
    """True if samples have an attention mask."""
    shares_mask: bool
    """True if all samples have the same attention mask."""
    has_borders: bool
    """True if samples have `cu_seqlens` and `max_seqlen`."""

    def tensors(self, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each tensor of a batch of B samples, in the order of a sample's keys."""
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
    """The tensors of B samples by name, each `[B, ...]`, equal to the stacked tensors of the samples.

    A dataset overwrites the batch only if it is given as `out`. If all samples share one attention mask, the batch has
    a view of it, which must not be written to.

    Args:
        tensors: by name.
        arrays: the same memory as arrays that a kernel writes to; None if samples were stacked.
        spec: specification that the tensors were allocated for.
        shared: names of the tensors that are views of one tensor shared by all samples and by other batches.
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
        """Allocates a batch of `size` samples.

        Args:
            spec: the tensors to allocate.
            size: B, at least 0.
            shared_mask: `[1, S, S]` the attention mask that all samples share, if any.
            pinned: True for page-locked memory, from which copies to a GPU are asynchronous.
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
        """Number of tensors."""
        return len(self._tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in self._tensors.items())
        return f"Batch({shapes})"

    @property
    def arrays(self) -> BatchArrays | None:
        """Memory that a kernel writes to; None if the batch was stacked from samples."""
        return self._arrays

    @property
    def shared(self) -> frozenset[str]:
        """Names of the tensors that are views of one tensor shared by all samples."""
        return self._shared

    @property
    def size(self) -> int:
        """B, number of samples."""
        return len(next(iter(self._tensors.values())))

    def samples(self) -> list[dict[str, torch.Tensor]]:
        """Returns the samples, each a view of this batch."""
        return [{name: tensor[at] for name, tensor in self._tensors.items()} for at in range(self.size)]

    def check_fits(self, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Checks that this batch has exactly the tensors `wanted`.

        Raises:
            ArgumentError: names, dtypes or shapes differ; the message names the first difference.
        """
        if list(self) != list(wanted):
            msg = f"out must hold {', '.join(wanted)}, found {', '.join(self)}"
            raise ArgumentError(msg)
        for name, (dtype, shape) in wanted.items():
            found = self._tensors[name]
            if found.dtype != dtype or tuple(found.shape) != shape:
                msg = f"{name} of out must be {dtype} {list(shape)}, found {found.dtype} {list(found.shape)}"
                raise ArgumentError(msg)

    def is_allocated_for(self, spec: BatchSpec, size: int) -> bool:
        """True if its memory equals what `empty` would allocate."""
        return self._spec is spec and self._arrays is not None and self._arrays.size == size

    def take(self, other: "Batch") -> None:
        """Adopts the memory of another batch."""
        vars(self).update(vars(other))

    def copy(self, tensors: Mapping[str, Any]) -> None:
        """Copies the values of tensors that fit into this batch; tensors that are shared are replaced."""
        for name, tensor in tensors.items():
            if name in self._shared:
                self._tensors[name] = tensor
            else:
                self._tensors[name].copy_(tensor)
        if self._shared:
            self._shared, self._spec = frozenset(), None  # its memory no longer equals what `empty` allocates
