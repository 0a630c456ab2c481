"""Process groups as values, passed to every function that communicates with other processes."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

import orjson

from trackbed.errors import ArgumentError


class Step(Protocol):
    """Work that all ranks of a group do at the same time."""

    def poll(self, done: int) -> None:
        """Sends a heartbeat if one is due; raises if another rank has failed. Call it every 50 ms or so, on any thread.

        Args:
            done: amount of work done, in any unit. Ignored: it is there because kernels call their `Poll` with it.

        Raises:
            Exception: another rank has failed. It must propagate to the end of the step, which reports the failure.
        """
        ...

    def check(self) -> None:
        """Raises if another rank has failed, as `poll` does, but sends no heartbeat."""
        ...

    def watching_waits(self, counts: Mapping[str, Callable[[], int]]) -> contextlib.AbstractContextManager[None]:
        """Raises, in the block, if ranks wait for each other at different operations.

        Waits of this thread for other ranks are watched: at collectives of any group, and those that
        `trackbed.comm.crossed_waits.begin_wait` is told of. Once two ranks each wait for what the other one has not
        entered, one of them raises a CollectiveError within a second.

        Args:
            counts: number of operations that were entered, for each domain of operations entered without waiting.
        """
        ...


class Group(Protocol):
    """Group of processes that includes the calling one.

    A collective is called on all ranks, in the same order, by one thread of each. Either every rank returns or every
    rank raises a CollectiveError, which has the same text on all ranks and names each rank that failed, with its error.
    Values must be JSON-serializable and are returned as JSON decodes them: tuples as lists, non-finite numbers as None.
    """

    @property
    def rank(self) -> int:
        """Number of this process, in `[0, size)`."""
        ...

    @property
    def size(self) -> int:
        """Number of processes, at least 1."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """Seconds for which a rank may send no heartbeat while others wait for it.

        A rank sends a heartbeat when it arrives at a collective and from `Step.poll`. A rank that is silent for longer
        is named in an error within a further fifth of the timeout, and the group is broken from then on.
        """
        ...

    def guarded(self, what: str, *, max_heartbeat_gap_seconds: float = 1.0) -> contextlib.AbstractContextManager[Step]:
        """Collective over the group: runs the block as one step, which either succeeds or fails on all ranks.

        Entering waits for no other rank, except at the first collective of a group with a secret; leaving waits for
        all ranks. If the block raises on one rank, `Step.poll` and collectives in the block raise on the others, and
        every rank raises a CollectiveError, on the failed rank chained to the original exception. An exception that is
        not an Exception (KeyboardInterrupt, SystemExit) propagates unchanged on the rank that raised it, once the other
        ranks have been notified.

        Args:
            what: description of the step, with which the error begins.
            max_heartbeat_gap_seconds: number of seconds after which `Step.poll` sends another heartbeat, with this
                rank's status; a tenth of the timeout if that is less.
        """
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Collective over the group: returns the value of each rank, in rank order.

        Every rank reads all values from one server, so values should be small.
        """
        ...

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """Collective over the group: returns the value of rank `source`; the values of the other ranks are ignored.

        Raises:
            ArgumentError: there is no such rank.
        """
        ...

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Collective over the group: returns `function` of the list of all ranks' values, in rank order.

        One rank computes it for all, so each of the other ranks reads only the result.

        Args:
            value: value of this rank.
            function: the same on every rank, without side effects; must not raise.
        """
        ...

    def agree(self, what: str, value: Any) -> None:
        """Collective over the group: checks that all ranks have the same value.

        Raises:
            CollectiveError: they do not. The error names the ranks that differ, and both values.
        """
        ...

    def barrier(self) -> None:
        """Collective over the group: returns once every rank has arrived."""
        ...

    def counter(self, name: str) -> Callable[[], int]:
        """Creates a counter shared by all ranks: each call returns the next integer, from 0, exactly once.

        Neither creating nor calling it is collective, and any thread may call it. It is valid until the next
        collective. An exception that it raises must propagate to the end of the step, as one of `Step.poll`.

        Args:
            name: unique among the counters between the same two collectives.
        """
        ...

    def child(self, name: str) -> "Group":
        """Creates a group of the same ranks whose steps are independent of this one's. Not collective.

        Another thread may use the child while this group is used: neither waits for the other, and their collectives,
        counters and statuses never mix. A child of a group with a secret has the same secret. Children may have
        children. On each rank, the child must be created under the same name.

        Failures are independent as well. A step that fails, or a silent rank that breaks one group, leaves the other
        usable; a rank that has died is noticed in each group in which others wait for it. So a child must not be waited
        for inside a step of its parent: a failure of that step does not end the wait. A rank that leaves a group leaves
        its children too.

        Args:
            name: not empty, without "/", and of no other child of this group. `Solo` accepts a name more than once.

        Raises:
            ArgumentError: the name is invalid, or another child has it.
        """
        ...

    def publish_status(self, value: Any) -> None:
        """Publishes a status of this rank, such as its progress, with its next heartbeat. Not collective."""
        ...

    def statuses(self) -> list[Any]:
        """Last known status of each rank, in rank order; None for a rank without one so far. Not collective."""
        ...


def check_source(source: int, size: int) -> None:
    """Raises ArgumentError unless `source` is a rank."""
    if not 0 <= source < size:
        raise ArgumentError(f"source must be a rank in [0, {size}), but is {source}")


def check_child_name(name: str) -> None:
    """Raises ArgumentError unless `name` can be that of a child."""
    if not name or "/" in name:
        raise ArgumentError(f"name must have at least one character, and no '/', but is {name!r}")


@dataclass(frozen=True, slots=True)
class Solo:
    """Group of a single process: it never waits, and its exceptions propagate unchanged."""

    rank: int = 0
    size: int = 1
    timeout_seconds: float = math.inf

    @contextlib.contextmanager
    def guarded(
        self,
        what: str,
        *,
        max_heartbeat_gap_seconds: float = 1.0,
    ) -> Iterator[Step]:
        """Runs the block; its exception propagates unchanged."""
        yield _SoloStep()

    def all_gather(self, value: Any) -> list[Any]:
        """The value alone, as JSON decodes it."""
        return [orjson.loads(orjson.dumps(value))]

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The value, as JSON decodes it."""
        check_source(source, self.size)
        return orjson.loads(orjson.dumps(value))

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Returns `function` of a list of the value alone, as JSON decodes it."""
        return orjson.loads(orjson.dumps(function(self.all_gather(value))))

    def agree(self, what: str, value: Any) -> None:
        """Returns at once: one value cannot differ."""

    def barrier(self) -> None:
        """Returns at once: no other rank has to arrive."""

    def counter(self, name: str) -> Callable[[], int]:
        """Creates a function that returns 0, 1, 2 and so on."""
        return partial(next, count())

    def child(self, name: str) -> "Solo":
        """The group itself, which has no state: its steps cannot mix, and a name may be used again."""
        check_child_name(name)
        return self

    def publish_status(self, value: Any) -> None:
        """Does nothing: no other rank reads it."""

    def statuses(self) -> list[Any]:
        """No status."""
        return [None]


class _SoloStep:
    def poll(self, done: int) -> None:
        """Does nothing: no other rank can fail."""

    def check(self) -> None:
        """Does nothing: no other rank can fail."""

    def watching_waits(
        self,
        counts: Mapping[str, Callable[[], int]],
    ) -> contextlib.AbstractContextManager[None]:
        """Does nothing: no other rank can wait."""
        return contextlib.nullcontext()


SOLO: Final = Solo()
