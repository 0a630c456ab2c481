"""Resumable position for any iterable of batches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable

from trackbed.errors import ArgumentError
from trackbed.loading.position import check_mapping

VERSION: Final = 1


@runtime_checkable
class BatchSampler(Protocol):
    """Iterates over the indices of batches from its position on, and exposes that position as state."""

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Iterates over the indices of each batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position after the last yielded batch."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a position."""
        ...


class CountedBatches:
    """Batches of an iterable without a position of its own, whose position is the number of yielded batches.

    Args:
        batches: iterable that yields the same batches each time. It is restarted after the last one.

    >>> counted = CountedBatches([[0, 1], [2, 3], [4, 5]])
    >>> counted.load_state_dict({"version": 1, "batches": 1})
    >>> list(counted), list(counted)
    ([[2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]])
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = batches
        self._yielded = 0
        self._begin = 0

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Iterates over the batches from the position on."""
        self._yielded, self._begin = self._begin, 0
        for batch in islice(self._batches, self._yielded, None):
            self._yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Number of yielded batches."""
        return {"version": VERSION, "batches": self._yielded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes after the number of batches in `state`."""
        check_mapping(state)
        if state.get("version") != VERSION or not isinstance(state.get("batches"), int) or state["batches"] < 0:
            raise ArgumentError(
                f"the state of batches must have version {VERSION} and a number of batches, found {dict(state)}"
            )
        self._yielded = self._begin = state["batches"]
