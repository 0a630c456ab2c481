"""Batches: the tensors of several samples, in reusable memory.

Shapes: B samples of the batch, S tokens of a sample.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import numpy.typing as npt
import torch

from trackbed.errors import ArgumentError


class BatchMemory(Protocol):
    """The memory of a batch as its kernel takes it."""

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """The arrays by name."""
        ...

    @property
    def size(self) -> int:
        """B."""
        ...


class BatchSpec(Protocol):
    """Specification of the tensors in the batches of a dataset."""

    @property
    def dataset_id(self) -> torch.dtype | None:
        """Dtype of the dataset's number in a blend; None without a blend."""
        ...

    def tensors(self, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each tensor of a batch of B samples, in the order of a sample's keys."""
        ...

    def memory(self, size: int, arrays: dict[str, npt.NDArray[Any]]) -> BatchMemory:
        """Returns the memory of a batch, arrays by name, as the kernel takes it."""
        ...


def as_tensors(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns tensors as they are, and arrays as tensors that view their memory."""
    return {name: one if isinstance(one, torch.Tensor) else torch.from_numpy(one) for name, one in parts.items()}


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
        arrays: BatchMemory | None = None,
        spec: BatchSpec | None = None,
        *,
        shared: Collection[str] = (),
    ) -> None:
        self._tensors = dict(tensors)
        self._viewed: dict[str, npt.NDArray[Any]] = {}
        """Arrays that view tensors."""
        self._arrays = arrays
        self._spec = spec
        self._shared = frozenset(shared)

    @classmethod
    def empty(
        cls, spec: BatchSpec, size: int, *, shared: Mapping[str, torch.Tensor] | None = None, pinned: bool = False
    ) -> "Batch":
        """Allocates a batch of `size` samples.

        Args:
            spec: the tensors to allocate.
            size: B, at least 0.
            shared: tensors that all samples share, by name, without the first axis.
            pinned: True for page-locked memory, from which copies to a GPU are asynchronous.
        """
        views = {name: tensor.expand(size, *tensor.shape) for name, tensor in (shared or {}).items()}
        wanted = spec.tensors(size)
        tensors = {
            name: views[name] if name in views else torch.empty(shape, dtype=dtype, pin_memory=pinned)
            for name, (dtype, shape) in wanted.items()
        }
        own = {name: one.numpy() for name, one in tensors.items() if name not in views and name != "dataset_id"}
        return cls(tensors, spec.memory(size, own), spec, shared=views)

    def __getstate__(self) -> dict[str, Any]:
        """State of the tensors alone: a copy has other memory, whose addresses no kernel knows."""
        return {**vars(self), "_viewed": {}, "_arrays": None, "_spec": None}

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
    def arrays(self) -> BatchMemory | None:
        """Memory that a kernel writes to; None if the batch was stacked from samples."""
        return self._arrays

    @property
    def shared(self) -> frozenset[str]:
        """Names of the tensors that are views of one tensor shared by all samples."""
        return self._shared

    @property
    def size(self) -> int:
        """B, number of samples."""
        return len(next(iter(self._tensors.values()))) if self._arrays is None else self._arrays.size

    def array(self, name: str) -> npt.NDArray[Any]:
        """Returns an array that views a tensor. Made once: a view of it costs a fifth."""
        found = self._viewed.get(name)
        if found is None:
            found = self._viewed[name] = self._tensors[name].numpy()
        return found

    def views(self) -> dict[str, Any]:
        """Returns what the batch holds, in its order: new arrays that view its memory, and tensors that are shared."""
        shared = self._shared
        return {name: one if name in shared else self.array(name).view() for name, one in self._tensors.items()}

    def samples(self) -> list[dict[str, torch.Tensor]]:
        """Returns the samples, each a view of this batch."""
        return [{name: tensor[at] for name, tensor in self._tensors.items()} for at in range(self.size)]

    def check_fits(self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Checks that this batch has exactly the tensors `tensors`.

        Raises:
            ArgumentError: names, dtypes or shapes differ; the message names the first difference.
        """
        if list(self) != list(tensors):
            raise ArgumentError(f"out must hold {', '.join(tensors)}, found {', '.join(self)}")
        for name, (dtype, shape) in tensors.items():
            found = self._tensors[name]
            if found.dtype != dtype or tuple(found.shape) != shape:
                raise ArgumentError(
                    f"{name} of out must be {dtype} {list(shape)}, found {found.dtype} {list(found.shape)}"
                )

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
            # Its memory no longer equals what `empty` allocates.
            self._shared, self._spec = frozenset(), None
            self._viewed.clear()
