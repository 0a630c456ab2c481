"""Receiver of the events of communication."""

from typing import Protocol

from trackbed.grads.collectives import Label, Work

__all__ = ["BucketObserver"]


class BucketObserver(Protocol):
    """Receives the events of the bucket groups of one rank, on the thread that trains."""

    def ready(self, label: Label) -> None:
        """All gradients of a group have arrived."""
        ...

    def issued(self, label: Label, kind: str, num_bytes: int, num_ranks: int, work: Work) -> None:
        """An operation of a group has been issued.

        Args:
            label: step and number of the group.
            kind: "all-reduce", "reduce-scatter" or "all-gather".
            num_bytes: bytes of the group's buffers.
            num_ranks: number of ranks.
            work: operation.
        """
        ...

    def waited(self, start: float, stop: float) -> None:
        """The rank has waited for an operation, from `start` to `stop` in seconds of `time.perf_counter`."""
        ...
