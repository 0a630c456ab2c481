"""Which indices are missing, and building them with all ranks that want them.

Shapes: E entries of a start, in the same order on every rank; R ranks.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, Final

from trackbed.build.making import Bundle, Progress, make_all, parts_of, read_ahead
from trackbed.build.plan import Task, leave_open, plan_tasks
from trackbed.cache import Memo, Pending, find_together
from trackbed.comm import Group
from trackbed.errors import CollectiveError

__all__ = ["Builders", "tasks_of"]

_LEAST_SHARED: Final = 2e8
"""Nanoseconds of a rank's fair part below which each does what the plan gives it."""
_UNSEEN: Final = (
    "another rank found or built it: see that path_to_cache leads to the same folder on every host, "
    "or wait until the file system shows it"
)


class _Ends(Enum):
    """Whether a rank asks for more after this."""

    always = "end"
    never = "more"
    if_nothing_is_missing = "maybe"


@dataclass(frozen=True, slots=True)
class _Found:
    """What all ranks said, as one of them sees it."""

    missing: Sequence[int]
    """What is not in this rank's cache."""
    builders: Sequence[int]
    """The ranks that want datasets and share this rank's cache; none if it wants none."""
    is_whole: bool
    """Whether nothing is missing, to anybody."""
    is_recall: bool
    """Whether the ranks asked if what they remember still holds."""
    is_last: bool
    """Whether nobody asks for more."""


class Builders:
    """The ranks of a group, of which those that want datasets build what is missing.

    Those that share a cache share the work. Where hosts keep caches of their own, the ranks of each build all of it.

    Args:
        group: all ranks.
        wants: whether this rank wants datasets. One that does not looks at no data, and builds nothing.
        num_threads: of this rank, at least 1.
        cache: what tells this rank's cache from other ranks'.
        progress: told of each entry that this rank has built.
    """

    def __init__(
        self, group: Group, *, wants: bool, num_threads: int, cache: str = "", progress: Progress | None = None
    ) -> None:
        self._group = group
        self._progress = progress
        self._wants = wants
        self._num_threads = num_threads
        self._cache = hashlib.sha256(cache.encode()).hexdigest()[:8]
        self.is_first = False
        """Whether this rank is the first of those that want datasets from its cache; known once they have settled."""

    def settle(self, pending: Sequence[Pending], *, is_last: bool, names: Sequence[str] = ()) -> None:
        """Collective over the group: find or build every entry.

        When this returns, another rank may still be building its part, unless `is_last` is False.

        Each rank looks for its share of the entries and says what is missing, and all make the same plan. What others
        found or built is opened when it is first read, or remembered.

        Args:
            pending: `[E]` what this rank wants. It knows which others want something else.
            is_last: whether nothing else follows.
            names: what else tells the datasets that this rank wants from others.

        Raises:
            CollectiveError: ranks want different datasets.
        """
        found = self._look_and_say(
            len(pending),
            partial(_missing, pending),
            self._digest(pending, *names),
            _Ends.always if is_last else _Ends.never,
        )
        if self._wants:
            self.is_first = found.builders[0] == self._group.rank
            self._build(pending, found)
            for entry in pending:
                entry.expect_others(_UNSEEN if self._group.size > 1 else None)
        if not is_last:
            self._group.barrier()

    def holds(self, memo: Memo | None, name: str) -> bool:
        """Collective over the group: whether nothing has changed of what is remembered, and nothing else follows.

        Each rank looks at its share of the files.

        Args:
            memo: what this rank remembers; None where it does not.
            name: what tells the datasets that this rank wants from others.

        Raises:
            CollectiveError: ranks want different datasets.
        """

        def changed(chunks: Sequence[int]) -> list[int]:
            return [chunk for chunk in chunks if memo is not None and not memo.holds([chunk])]

        num_chunks, version = (0, None) if memo is None else (memo.num_chunks, memo.crc32)
        found = self._look_and_say(num_chunks, changed, name, _Ends.if_nothing_is_missing, version=version)
        return found.is_whole

    def attend(self) -> None:
        """Collective over the group: `holds` and `settle`, as often as the others do, for a rank that wants nothing."""
        while not (found := self._look_and_say(0, lambda _share: [], "", _Ends.always)).is_last:
            if not found.is_recall:
                self._group.barrier()

    def _look_and_say(
        self,
        count: int,
        look: Callable[[Sequence[int]], list[int]],
        wanted: str,
        ends: "_Ends",
        *,
        version: int | None = None,
    ) -> _Found:
        """What all ranks know. Each looks at its share; where some want nothing, or caches differ, at more.

        Args:
            count: things to look for.
            look: given numbers of some, gives those that are missing.
            wanted: what tells what this rank wants from what others want.
            ends: whether nothing else follows.
            version: of what is remembered; ranks that remember nothing, or not the same, miss something.
        """
        rank, size = self._group.rank, self._group.size
        own = {
            "ends": ends.value,
            "wanted": f"{wanted} {ends.value}" if self._wants else None,
            "missing": look(range(rank, count, size)) if self._wants else [],
            "version": version,
            "cache": self._cache,
        }
        said: dict[str, Any] = self._group.combine(own, _sum_up)
        _check_agreement(said["different"])
        missing, builders, is_whole = (
            (said["missing"], range(size), not said["missing"])
            if said["caches"] is None
            else self._look_again(count, look, said["caches"], said["missing"])
        )
        is_whole = is_whole and not said["is_unknown"]
        is_last = is_whole if said["is_recall"] else said["is_last"]
        return _Found(missing, builders, is_whole, said["is_recall"], is_last)

    def _look_again(
        self, count: int, look: Callable[[Sequence[int]], list[int]], caches: list[list[int]], seen: list[int]
    ) -> tuple[Sequence[int], Sequence[int], bool]:
        """What is missing in this rank's cache, the ranks that build there, and whether nothing is missing anywhere.

        Args:
            count: things to look for.
            look: given numbers of some, gives those that are missing.
            caches: the ranks that build in each.
            seen: what was missing where ranks looked already, if there is but one cache.
        """
        rank, size = self._group.rank, self._group.size
        looked = set(caches[0]) if len(caches) == 1 else set()
        left = [number for number in range(count) if number % size not in looked]
        number = next((number for number, ranks in enumerate(caches) if rank in ranks), None)
        builders = [] if number is None else caches[number]
        share = look(left[builders.index(rank) :: len(builders)]) if builders else []
        by_cache: dict[str, list[int]] = self._group.combine([number, share], _by_cache)
        known = seen if looked else []
        is_whole = not known and not any(by_cache.values())
        return sorted([*known, *by_cache.get(str(number), [])]), builders, is_whole

    def _digest(self, pending: Sequence[Pending], *names: str) -> str:
        """What is wanted, in 16 digits; nothing for one alone, who agrees.

        Stems alone do not tell: Megatron Core's leave out some options, and the identity of the data.
        """
        if self._group.size == 1:
            return ""
        entries = [f"{one.entry.stem} {one.entry.fingerprint}" for one in pending]
        return hashlib.sha256("\n".join([*entries, *names]).encode()).hexdigest()[:16]

    def _build(self, pending: Sequence[Pending], found: _Found) -> None:
        missing = [pending[number] for number in found.missing]
        builder, num_builders = found.builders.index(self._group.rank), len(found.builders)
        tasks = tasks_of(missing)
        plan = plan_tasks(tasks, num_builders)
        own, open_to_all = leave_open(tasks, plan, least=_LEAST_SHARED)
        parts = parts_of([missing[task] for task in open_to_all], num_builders)
        make_all(
            [missing[task] for task in own[builder]],
            num_threads=self._num_threads,
            blend_has_thread=num_builders == 1,  # else it was planned for, and would take others' time
            progress=self._progress,
            planned=[missing[task] for task in plan.by_rank[builder]],
            taken=_taken(parts, self._group.counter(self._cache)) if parts else (),
        )


def tasks_of(pending: Sequence[Pending]) -> list[Task]:
    """Building these entries, as tasks to be planned."""
    return [Task(f"{one.entry.stem} {number}", one.cost, one.is_blend) for number, one in enumerate(pending)]


def _taken(parts: Sequence[Sequence[Bundle]], take: Callable[[], int]) -> Iterator[Bundle]:
    """The bundles of parts that this rank is the first to ask for.

    Args:
        parts: the same on every rank.
        take: gives 0, 1, 2 and so on, each number to one rank only.
    """
    while (number := take()) < len(parts):
        read_ahead(parts[number])
        yield from parts[number]


def _missing(pending: Sequence[Pending], share: Sequence[int]) -> list[int]:
    """Those of a share of the entries that are not in the cache."""
    share = [number for number in share if number < len(pending)]
    found = find_together([pending[number] for number in share])
    return [number for number, is_there in zip(share, found, strict=True) if not is_there]


def _sum_up(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks said, in a few bytes however many they are.

    `caches` are the ranks that want datasets, cache by cache, or None where all do, from one; `is_last`, whether none
    of them has more to ask for, and `is_recall`, whether that depends on what is missing; `different`, two that want
    different datasets; `is_unknown`, whether ranks of a cache do not remember the same; `missing`, what was looked for
    and is not there.
    """
    caches: dict[str, list[int]] = {}
    versions = set()
    for rank, one in enumerate(said):
        if one["wanted"] is not None:
            caches.setdefault(one["cache"], []).append(rank)
            versions.add((one["cache"], one["version"]))
    builders = sorted(chain.from_iterable(caches.values()))
    others = [rank for rank in builders if said[rank]["wanted"] != said[builders[0]]["wanted"]]
    ends = {said[rank]["ends"] for rank in builders}
    is_recall = ends == {_Ends.if_nothing_is_missing.value}
    return {
        "caches": None if list(map(len, caches.values())) == [len(said)] else list(caches.values()),
        "is_last": ends <= {_Ends.always.value},
        "is_recall": is_recall,
        "different": [builders[0], others[0]] if others else None,
        "is_unknown": is_recall and (len(versions) > len(caches) or any(version is None for _, version in versions)),
        "missing": _joined([one["missing"] for one in said]),
    }


def _by_cache(said: list[tuple[int | None, list[int]]]) -> dict[str, list[int]]:
    """What is missing, by the number of the cache."""
    shares: dict[str, list[list[int]]] = {}
    for number, share in said:
        shares.setdefault(str(number), []).append(share)
    return {number: _joined(lists) for number, lists in shares.items()}


def _joined(shares: list[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(shares))


def _check_agreement(different: Sequence[int] | None) -> None:
    if different is not None:
        msg = (
            f"every rank must ask for the same datasets, but rank {different[1]} asks for others than rank "
            f"{different[0]}: compare their configurations, sizes and data"
        )
        raise CollectiveError(msg)
