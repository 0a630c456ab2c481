"""Any batches of indices, with a position that can be kept and gone back to."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable

from trackbed.errors import ArgumentError
from trackbed.loading.position import check_mapping

__all__ = ["BatchSampler", "CountedBatches"]

VERSION: Final = 1


@runtime_checkable
class BatchSampler(Protocol):
    """Gives the indices of batches from its position on, and keeps that position."""

    def __iter__(self) -> Iterator[Sequence[int]]:
        """The indices of each batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        ...


class CountedBatches:
    """The batches of an iterable that has no position of its own, counted.

    Args:
        batches: the same batches each time it is iterated. After the last one it is begun anew.

    >>> counted = CountedBatches([[0, 1], [2, 3], [4, 5]])
    >>> counted.load_state_dict({"version": 1, "batches": 1})
    >>> list(counted), list(counted)
    ([[2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]])
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = batches
        self._given = 0
        self._begin = 0

    def __iter__(self) -> Iterator[Sequence[int]]:
        """The batches from the position on."""
        self._given, self._begin = self._begin, 0
        for batch in islice(self._batches, self._given, None):
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many batches were given."""
        return {"version": VERSION, "batches": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many batches.

        Raises:
            ArgumentError: `state` is of another version, or counts no batches.
        """
        check_mapping(state)
        if state.get("version") != VERSION or not isinstance(state.get("batches"), int) or state["batches"] < 0:
            msg = f"the state of batches must have version {VERSION} and a number of batches, found {dict(state)}"
            raise ArgumentError(msg)
        self._given = self._begin = state["batches"]
