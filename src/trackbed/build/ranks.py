"""Which indices are missing, and building them with all ranks that want them.

Shapes: E entries of a start, in the same order on every rank; R ranks.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextvars import copy_context
from threading import Event
from typing import Any, Final

from trackbed.build.plan import Plan, Task, plan_tasks
from trackbed.cache import Pending
from trackbed.comm import Group
from trackbed.errors import CollectiveError
from trackbed.kernels import watched

__all__ = ["Builders", "make_all"]

_UNSEEN: Final = (
    "another rank found or built it: see that path_to_cache leads to the same folder on every host, "
    "or wait until the file system shows it"
)


class Builders:
    """The ranks of a group, of which those that want datasets build what is missing.

    Args:
        group: all ranks.
        wants: whether this rank wants datasets. One that does not looks at no data, and builds nothing.
        num_threads: of this rank, at least 1.
    """

    def __init__(self, group: Group, *, wants: bool, num_threads: int) -> None:
        self._group = group
        self._wants = wants
        self._num_threads = num_threads

    def settle(self, pending: Sequence[Pending], *, is_last: bool) -> None:
        """Collective over the group: find or build every entry.

        When this returns, another rank may still be building its part, unless `is_last` is False.

        Each rank looks for its share of the entries and says what is missing, and all make the same plan. What others
        found or built is opened when it is first read.

        Args:
            pending: `[E]` what this rank wants. It knows which others want something else.
            is_last: whether nothing else follows.

        Raises:
            CollectiveError: ranks want different datasets.
        """
        said = self._look_and_say(pending, is_last=is_last)
        builders = [rank for rank, one in enumerate(said) if one["wants"]]
        if builders and self._wants:
            self._build(pending, [number for one in said for number in one["missing"]], builders)
            for entry in pending:
                entry.expect_others(_UNSEEN if self._group.size > 1 else None)
        if not is_last:
            self._group.barrier()

    def attend(self) -> None:
        """Collective over the group: `settle`, as often as the others do, for a rank that wants nothing."""
        while not all(one["is_last"] for one in self._look_and_say([], is_last=True) if one["wants"]):
            self._group.barrier()

    def _look_and_say(self, pending: Sequence[Pending], *, is_last: bool) -> list[dict[str, Any]]:
        """What each rank said: whether it wants datasets, and which of the entries that it looked for are missing."""
        rank, size = self._group.rank, self._group.size
        said = self._group.all_gather(
            {
                "wants": self._wants,
                "is_last": is_last,
                "wanted": _digest(pending) if self._wants else None,
                "missing": _missing(pending, range(rank, len(pending), size)),
            }
        )
        builders = [other for other, one in enumerate(said) if one["wants"]]
        _check_agreement({other: said[other]["wanted"] for other in builders})
        if 0 < len(builders) < size:
            share: list[int] = []
            if self._wants:
                unseen = [number for number in range(len(pending)) if not said[number % size]["wants"]]
                share = _missing(pending, unseen[builders.index(rank) :: len(builders)])
            for one, missing in zip(said, self._group.all_gather(share), strict=True):
                one["missing"] += missing
        return said

    def _build(self, pending: Sequence[Pending], missing: Sequence[int], builders: Sequence[int]) -> None:
        plan = plan_pending([pending[number] for number in missing], len(builders))
        mine = plan.by_rank[builders.index(self._group.rank)]
        make_all([pending[missing[task]] for task in mine], num_threads=self._num_threads)


def plan_pending(pending: Sequence[Pending], num_ranks: int) -> Plan:
    """Who builds which of these entries."""
    tasks = [Task(f"{one.entry.stem} {number}", one.cost, one.is_blend) for number, one in enumerate(pending)]
    return plan_tasks(tasks, num_ranks)


def make_all(pending: Sequence[Pending], *, num_threads: int) -> None:
    """Build these entries, in their order; a blend, which one thread builds, beside the others.

    Args:
        pending: blends first.
        num_threads: for the other entries, at least 1.

    Raises:
        Exception: what was raised first. Everything that was still running is stopped then.
    """
    num_threads += any(one.is_blend for one in pending)
    if min(num_threads, len(pending)) < 2:
        for one in pending:
            one.make()
        return
    stopped = Event()

    def look(_done: int) -> None:
        if stopped.is_set():
            raise CancelledError

    def make(one: Pending) -> None:
        with watched(look):
            one.make()

    with ThreadPoolExecutor(num_threads, thread_name_prefix="trackbed-build") as pool:
        futures = [pool.submit(copy_context().run, make, one) for one in pending]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _missing(pending: Sequence[Pending], share: Sequence[int]) -> list[int]:
    """Those of a share of the entries that are not in the cache."""
    return [number for number in share if number < len(pending) and not pending[number].find()]


def _digest(pending: Sequence[Pending]) -> str:
    """What is wanted, in 16 digits: the names of the entries, which are digests themselves."""
    return hashlib.sha256("\n".join(one.entry.stem for one in pending).encode()).hexdigest()[:16]


def _check_agreement(wanted: dict[int, str]) -> None:
    first = next(iter(wanted), None)
    others = [rank for rank, digest in wanted.items() if first is not None and digest != wanted[first]]
    if others:
        msg = (
            f"every rank must ask for the same datasets, but rank {others[0]} asks for others than rank {first}: "
            "compare their configurations and sizes"
        )
        raise CollectiveError(msg)
