"""Processes as a value: whoever works with others is told with whom."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

import orjson

from trackbed.errors import ArgumentError

__all__ = ["SOLO", "Group", "Solo", "Step", "check_source"]


class Step(Protocol):
    """Work that all ranks of a group do at the same time."""

    def poll(self, done: int) -> None:
        """Say that this rank is alive; raise if another rank has failed. To be called every 50 ms or so, by any thread.

        Args:
            done: how much is done, in whatever unit. Not looked at: kernels call their `Poll` with it.

        Raises:
            Exception: another rank has failed. It must go up to the end of the step, which says what happened.
        """
        ...


class Group(Protocol):
    """Some processes, of which this is one.

    What is collective is called on all ranks, in the same order, by one thread of each. Either every rank returns or
    every rank raises: a CollectiveError that names each rank that failed with its words, and has the same text on all
    of them. Values are what JSON holds, and come back as JSON gives them: tuples as lists, numbers that are not finite
    as None.
    """

    @property
    def rank(self) -> int:
        """Number of this process, in `[0, size)`."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are, at least 1."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """For how long a rank may give no sign of life while others wait for it.

        Arriving is a sign, and so is `Step.poll`. A rank that is silent for longer is named within a fifth more, and
        the group is broken from then on.
        """
        ...

    def together(self, what: str) -> contextlib.AbstractContextManager[Step]:
        """Collective over the group: what is in the block is one step, which no rank leaves alone.

        Entering waits for nobody, but for the first collective of a group with a secret; leaving waits for all. If a
        rank leaves with an exception, `Step.poll` raises on the others, as do collectives in the block, and every rank
        raises a CollectiveError: on the rank that failed, from the exception itself. What is no Exception
        (KeyboardInterrupt, SystemExit) goes on up unchanged where it was raised, when the others have been told.

        Args:
            what: what is being done; the error begins with it.
        """
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Collective over the group: the value of each rank, in rank order.

        Every rank reads all values from one server: for small ones.
        """
        ...

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """Collective over the group: the value of rank `source`. Those of the others are not looked at.

        Raises:
            ArgumentError: there is no such rank.
        """
        ...

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Collective over the group: what `function` makes of the values of all ranks, in rank order.

        One rank computes it for all, so that each of the others reads the result alone.

        Args:
            value: what this rank has to say.
            function: the same on every rank, without side effects; it must not raise.
        """
        ...

    def agree(self, what: str, value: Any) -> None:
        """Collective over the group: return if all ranks have the same value.

        Raises:
            CollectiveError: they do not. It names the ranks that differ, and both values.
        """
        ...

    def barrier(self) -> None:
        """Collective over the group: return when every rank has come."""
        ...

    def counter(self, name: str) -> Callable[[], int]:
        """What gives 0, 1, 2 and so on, each number once over all ranks that ask: who gets it first does what it means.

        Neither this nor asking is collective, and any thread may ask. It lasts until the next collective. What it
        raises must go up to the end of the step, as what `Step.poll` raises.

        Args:
            name: of no other counter between the same two collectives.
        """
        ...

    def tell(self, value: Any) -> None:
        """Say something of this rank, such as how far it is; it goes out with its next sign of life. Not collective."""
        ...

    def told(self) -> list[Any]:
        """What each rank told last, in rank order; None of one that has not, or not yet. Not collective."""
        ...


def check_source(source: int, size: int) -> None:
    """Raise ArgumentError unless `source` is a rank."""
    if not 0 <= source < size:
        msg = f"source must be a rank in [0, {size}), but is {source}"
        raise ArgumentError(msg)


@dataclass(frozen=True, slots=True)
class Solo:
    """One process on its own: it waits for nobody, and its errors are its own."""

    rank: int = 0
    size: int = 1
    timeout_seconds: float = math.inf

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[Step]:  # noqa: ARG002  errors go up unchanged
        """What is in the block; its exception goes up unchanged."""
        yield _SoloStep()

    def all_gather(self, value: Any) -> list[Any]:
        """The value, as JSON gives it back."""
        return [orjson.loads(orjson.dumps(value))]

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The value, as JSON gives it back."""
        check_source(source, self.size)
        return orjson.loads(orjson.dumps(value))

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """What `function` makes of the value, as JSON gives it back."""
        return orjson.loads(orjson.dumps(function(self.all_gather(value))))

    def agree(self, what: str, value: Any) -> None:
        """Return: one alone agrees."""

    def barrier(self) -> None:
        """Return: everybody is here."""

    def counter(self, name: str) -> Callable[[], int]:  # noqa: ARG002  it is this process's own
        """What gives 0, 1, 2 and so on."""
        return partial(next, count())

    def tell(self, value: Any) -> None:
        """Return: nobody listens."""

    def told(self) -> list[Any]:
        """Nothing."""
        return [None]


class _SoloStep:
    def poll(self, done: int) -> None:
        """Return: nobody else can fail."""


SOLO: Final = Solo()
