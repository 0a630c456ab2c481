"""Building the entries that are one rank's to build, on its threads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from itertools import chain
from threading import BoundedSemaphore, Event, Lock
from typing import Final, Self

from trackbed.cache import Pending, bundles_of, make_together
from trackbed.kernels import poll_now, polling

__all__ = ["Bundle", "Progress", "make_all", "parts_of", "read_ahead"]

Progress = Callable[[int, int, float], None]
"""Called with the entries that this rank has built, those that the plan gives it, and by what they cost the share of
these that is done: at first with none built, and by one thread at a time. A rank that takes over from others gets
beyond its plan, and above 1."""

Bundle = Sequence[Pending]
"""Entries that are built in one call: see `bundles_of`."""

_PARTS_PER_RANK: Final = 64
_LEAST_PART: Final = 2e7
"""What a rank builds comes in so many parts, and as many of what is open to all, if all are equally fast; each of at
least so many nanoseconds, as to ask for one takes 1e5."""


def parts_of(pending: Sequence[Pending], num_ranks: int = 1) -> list[list[Bundle]]:
    """Cut entries that some ranks build into parts that one takes at a time. Pure, and the same on every rank.

    Args:
        pending: in the order in which they are to be built.
        num_ranks: at least 1.
    """
    enough = max(_LEAST_PART, sum(one.cost for one in pending) / num_ranks / _PARTS_PER_RANK)
    parts: list[list[Bundle]] = []
    cost = enough
    for bundle in bundles_of(pending):
        if cost >= enough:
            parts.append([])
            cost = 0.0
        parts[-1].append(bundle)
        cost += sum(one.cost for one in bundle)
    return parts


def make_all(
    pending: Sequence[Pending],
    *,
    num_threads: int,
    blend_has_thread: bool = False,
    progress: Progress | None = None,
    planned: Sequence[Pending] | None = None,
    taken: Iterable[Bundle] = (),
) -> None:
    """Build these entries, in their order; a blend, which one thread builds, beside the others.

    Args:
        pending: blends first.
        num_threads: at least 1. Small entries, whose files take most of the time, have two.
        blend_has_thread: whether blends are built by one thread more.
        progress: told of each entry that was built.
        planned: those that the progress is measured by, if not `pending`.
        taken: what is built after these; each bundle is asked for when there is time for it.

    Raises:
        Exception: what was raised first. Everything that was still running is stopped then.
    """
    making = _Making(pending if planned is None else planned, progress)
    making.begin()
    building = BoundedSemaphore(num_threads)
    blends = bundles_of([one for one in pending if one.is_blend])
    parts = parts_of([one for one in pending if not one.is_blend])
    others = list(chain.from_iterable(parts))
    num_lanes = max(num_threads, 1 + any(len(bundle) > 1 for bundle in others))
    num_lanes = max(num_lanes, 2) if taken else min(num_lanes, len(others))
    queue = _Queue(chain(_in_turn(parts), _ask_when_free(taken, building)))
    blending: AbstractContextManager[object] = nullcontext() if blend_has_thread else building
    lanes = [(iter(blends), blending)] * bool(blends) + [(queue, building)] * num_lanes
    if len(lanes) < 2:
        making.make_each(chain(blends, queue), building)
        return
    with ThreadPoolExecutor(len(lanes), thread_name_prefix="trackbed-build") as pool, polling(making.look):
        futures = [pool.submit(copy_context().run, making.make_each, lane, alone) for lane, alone in lanes]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            making.stopped.set()
            raise


class _Queue:
    """An iterator that threads may share."""

    def __init__(self, bundles: Iterable[Bundle]) -> None:
        self._bundles = iter(bundles)
        self._lock = Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Bundle:
        with self._lock:
            return next(self._bundles)


class _Making:
    """How far the building of some entries is."""

    def __init__(self, pending: Sequence[Pending], progress: Progress | None) -> None:
        self.stopped = Event()
        self._total = len(pending)
        self._cost = sum(one.cost for one in pending)
        self._done = 0
        self._done_cost = 0.0
        self._progress = progress
        self._lock = Lock()

    def begin(self) -> None:
        """Tell what is to be done, if anything is."""
        if self._progress is not None and self._total:
            self._progress(0, self._total, 0.0)

    def look(self, _done: int) -> None:
        """End kernels that are of no use any more."""
        if self.stopped.is_set():
            raise CancelledError

    def make_each(self, bundles: Iterable[Bundle], alone: AbstractContextManager[object]) -> None:
        """Build bundles of entries until there are no more.

        Args:
            bundles: of `bundles_of`.
            alone: entered for each entry that is built on its own.
        """
        for bundle in bundles:
            poll_now(self._done)  # kernels of small entries end before they would
            make_together(bundle, alone=alone)
            with self._lock:
                for one in bundle:
                    self._tell(one)

    def _tell(self, one: Pending) -> None:
        """Tell that an entry was built."""
        self._done += 1
        self._done_cost += one.cost
        if self._progress is not None:
            self._progress(self._done, self._total, self._done_cost / self._cost if self._cost else 1.0)


def _in_turn(parts: Sequence[Sequence[Bundle]]) -> Iterator[Bundle]:
    """The bundles of these parts, where what one part reads is asked for while the part before it is built."""
    ahead = iter(parts)
    read_ahead(next(ahead, []))
    for part in parts:
        read_ahead(next(ahead, []))
        yield from part


def read_ahead(part: Sequence[Bundle]) -> None:
    """Have the system begin to read what building a part reads."""
    for one in chain.from_iterable(part):
        poll_now()
        one.read_ahead()


def _ask_when_free(bundles: Iterable[Bundle], building: AbstractContextManager[object]) -> Iterator[Bundle]:
    """The bundles, each asked for when not all threads are building: else another rank may have time for it sooner."""
    rest = iter(bundles)
    while True:
        with building:
            bundle = next(rest, None)
        if bundle is None:
            return
        yield bundle
