"""Collectives on buffers: the protocol that all implementations share, and the collectives of a single rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trackbed.errors import CollectiveError

Fetch: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

MAX_NUMBERS: Final = 32
"""Highest number of values that `Collectives.exchange` sends."""


class BackendError(CollectiveError):
    """The library that carries the collectives failed, for instance because it lost a connection."""


class Label(NamedTuple):
    """Name of an operation, with which ranks that are at different operations are told apart."""

    step: int = 0
    """Number of the training step."""
    bucket: int = 0
    """Number of the bucket group."""


NO_LABEL: Final = Label()
LEFT: Final = Label(-1)
"""Label of the exchange with which a rank leaves a training loop."""
OPTIMIZER_STATE: Final = Label(-2)
"""Label of the exchange with which the state of an optimizer is gathered."""
AGREED: Final = Label(-6)
"""Label of the exchange in which ranks agree on a flag."""
NORM: Final = Label(-3)
"""Label of the exchange of norms."""
TOKENS: Final = Label(-4)
"""Label of the exchange of the numbers of tokens."""
USED: Final = Label(-5)
"""Label of the exchange of the parameters that have gradients."""

EXCHANGES: Final = {
    NORM: "the norm of the gradients",
    TOKENS: "the number of tokens",
    USED: "the parameters that have gradients",
    AGREED: "agree()",
}
"""Descriptions of exchanges, by their labels."""


class Work(Protocol):
    """Operation that has been issued, and may still be running."""

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the operation, for at most `seconds`; without a limit for None. Returns True if it is done.

        Raises:
            CollectiveError: the operation failed.
        """
        ...

    def is_done(self) -> bool:
        """True if the operation is over; it may have failed."""
        ...

    def on_done(self, call: Callable[[], None]) -> None:
        """Calls `call` once the operation is over, on any thread."""
        ...

    def late_ranks(self) -> list[int]:
        """Ranks that the operation waits for; empty if that is not known."""
        ...


class Collectives(Protocol):
    """Collectives of the ranks of a group, on buffers of equal sizes and types.

    Every rank issues the same operations in the same order. An operation changes the buffers in place, which must be
    left alone until it is done. Sums add rank r + h to rank r for n ranks and h = ceil(n / 2), then n = h, until one is
    left; "torch" adds in this order only where it says so.
    """

    def rank(self) -> int:
        """Number of this rank, in `[0, size())`."""
        ...

    def size(self) -> int:
        """Number of ranks, at least 1."""
        ...

    def num_issued(self) -> int:
        """Number of operations that this rank has issued."""
        ...

    def all_reduce(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Replaces each buffer by the sum over all ranks.

        Args:
            buffers: contiguous vectors.
            scale: factor by which every rank multiplies its numbers before the sum, in their type.
            average: True to divide the sum by the number of ranks.
            label: name of the operation, the same on all ranks.
        """
        ...

    def reduce_scatter(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Replaces this rank's shard of each buffer by the sum over all ranks. Other shards keep the scaled numbers.

        Args: see `all_reduce`; the buffers have a multiple of `size()` elements, of which rank r owns the r-th part.
        """
        ...

    def all_gather(self, buffers: Sequence[torch.Tensor], *, label: Label) -> Work:
        """Replaces each shard of each buffer by that of the rank that owns it."""
        ...

    def exchange(
        self, numbers: npt.NDArray[np.int64], *, label: Label = NO_LABEL, more: torch.Tensor | None = None
    ) -> "Exchange":
        """Sends a few numbers to all ranks.

        Args:
            numbers: `[K]` as many on every rank.
            label: name of the operation, the same on all ranks.
            more: `[M]` int64 numbers on the device of the buffers, sent behind the others. The host does not read them.
                K + M is at most `MAX_NUMBERS`.
        """
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int) -> Work:
        """Replaces the tensors, of any shape, by those of rank `source`."""
        ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """Numbers of all ranks."""

    work: Work
    decode: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    """Returns the numbers, given those of `received`, or none."""
    received: torch.Tensor | None = None
    """Vector of int64 that holds what was received, once the work is done; None if the host has it already."""

    def read(self, fetch: Fetch = torch.Tensor.cpu) -> npt.NDArray[np.int64]:
        """Returns `[ranks, K + M]` numbers, once the work is done; see `read_together`."""
        return read_together([self], fetch)[0]


def read_together(exchanges: Sequence[Exchange], fetch: Fetch = torch.Tensor.cpu) -> list[npt.NDArray[np.int64]]:
    """Returns the numbers of several exchanges whose works are done, with one copy from a GPU to the host.

    Args:
        exchanges: at least one. What is on another device than the first is copied there.
        fetch: copies a tensor from a GPU to the host, and waits for the copy.

    Raises:
        CollectiveError: ranks were at different operations, in the first exchange where that is so.
    """
    received = [exchange.received for exchange in exchanges if exchange.received is not None]
    ends = np.cumsum([0 if exchange.received is None else len(exchange.received) for exchange in exchanges])
    joined = torch.cat([part.to(received[0].device) for part in received]) if received else None
    numbers = np.empty(0, dtype=np.int64) if joined is None else fetch(joined).numpy()
    parts = np.split(numbers, ends[:-1])
    return [exchange.decode(part) for exchange, part in zip(exchanges, parts, strict=True)]


def exchange_of_one(numbers: npt.NDArray[np.int64], more: torch.Tensor | None) -> Exchange:
    """Exchange of a single rank with itself. See `Collectives.exchange`."""
    sent = numbers.copy()
    if more is None:
        return Exchange(DONE, lambda _: sent[np.newaxis])
    return Exchange(DONE, lambda read: np.concatenate([sent, read])[np.newaxis], more)


@dataclass(frozen=True, slots=True)
class Done:
    """Work that is done."""

    def wait(self, seconds: float | None = None) -> bool:
        """True."""
        return True

    def is_done(self) -> bool:
        """True."""
        return True

    def on_done(self, call: Callable[[], None]) -> None:
        """Calls `call`."""
        call()

    def late_ranks(self) -> list[int]:
        """No rank."""
        return []


DONE: Final = Done()


_PLACES: Final = {
    LEFT.step: "has left the training loop",
    OPTIMIZER_STATE.step: "gathers the state of the optimizer",
    NORM.step: "is at the norm of the gradients",
    TOKENS.step: "is at the number of tokens",
    AGREED.step: "is in agree()",
}


def check_places(own_rank: int, places: Sequence[tuple[str, Label]]) -> None:
    """Checks that all ranks are at the same operation.

    Args:
        own_rank: number of this rank.
        places: kind and label of the operation of each rank.

    Raises:
        CollectiveError: they are not; the message has the first rank that is at another one than this rank.
    """
    for rank, place in enumerate(places):
        if place != places[own_rank]:
            raise CollectiveError(
                f"gradients: all ranks must be at the same operation, but {_describe(rank, *place)} and "
                f"{_describe(own_rank, *places[own_rank])}"
            )


def _describe(rank: int, kind: str, label: Label) -> str:
    where = _PLACES.get(label.step, f"is at the {kind} of bucket {label.bucket} in step {label.step}")
    return f"rank {rank} {where}"


def shard_of(buffer: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Part of a buffer that a rank owns: the `rank`-th of `size` equal ones."""
    count = buffer.numel() // size
    return buffer[rank * count : (rank + 1) * count]


SUMMABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types that the kernels can add."""


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Views a tensor on the CPU as an array; bfloat16, which NumPy lacks, as uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


@dataclass(frozen=True, slots=True)
class SoloCollectives:
    """Collectives of a single rank: nothing but the scaling is left to do. See `Collectives`."""

    def rank(self) -> int:
        """0."""
        return 0

    def size(self) -> int:
        """1."""
        return 1

    def num_issued(self) -> int:
        """0: nothing is waited for."""
        return 0

    def all_reduce(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Scales the buffers."""
        if scale != 1.0:
            for buffer in buffers:
                buffer *= scale
        return DONE

    def reduce_scatter(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Scales the buffers."""
        return self.all_reduce(buffers, scale=scale, average=average, label=label)

    def all_gather(self, buffers: Sequence[torch.Tensor], *, label: Label) -> Work:
        """Does nothing."""
        return DONE

    def exchange(
        self, numbers: npt.NDArray[np.int64], *, label: Label = NO_LABEL, more: torch.Tensor | None = None
    ) -> Exchange:
        """Returns the numbers."""
        return exchange_of_one(numbers, more)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int) -> Work:
        """Does nothing."""
        return DONE
