"""Which indices are missing, and building them with all ranks that want them.

Shapes: E entries of a start, in the same order on every rank; R ranks.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, Final

from trackbed.builder.agreement import Difference, Request, find_difference, first_difference
from trackbed.builder.executor import Bundle, Progress, make_all, parts_of, read_ahead
from trackbed.builder.plan import Task, leave_open, plan_tasks
from trackbed.cache import Memo, Pending, find_together
from trackbed.comm import Group
from trackbed.errors import CollectiveError

__all__ = ["Builders", "tasks_of"]

logger = logging.getLogger(__name__)

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
        self._share = ""
        """What tells the ranks that share this one's work from others."""
        self._warned: list[int] | None = None
        self.is_first = False
        """Whether this rank is the first of those that want datasets from its cache; known once they have settled."""

    def settle(
        self, pending: Sequence[Pending], request: Callable[[], Request] = lambda: Request(()), *, is_last: bool
    ) -> None:
        """Collective over the group: find or build every entry.

        When this returns, another rank may still be building its part, unless `is_last` is False.

        Each rank looks for its share of the entries and says what is missing, and all make the same plan. What others
        found or built is opened when it is first read, or remembered.

        Args:
            pending: `[E]` what this rank wants.
            request: gives what it asks for, to be compared with what others do; not called for one alone.
            is_last: whether nothing else follows.

        Raises:
            CollectiveError: ranks want different datasets.
        """
        is_shared = self._wants and self._group.size > 1
        found = self._look_and_say(
            len(pending),
            partial(_missing, pending),
            request() if is_shared else None,
            _Ends.always if is_last else _Ends.never,
            names="\n".join(one.entry.stem for one in pending) if is_shared else "",
        )
        if self._wants:
            self.is_first = found.builders[0] == self._group.rank
            self._build(pending, found)
            for entry in pending:
                entry.expect_others(_UNSEEN if self._group.size > 1 else None)
        if not is_last:
            self._group.barrier()

    def holds(self, memo: Memo | None, key: str | None) -> bool:
        """Collective over the group: true if nothing has changed of what is remembered, and nothing else follows.

        Each rank looks at its share of the files. Ranks of different keys may still ask for equal data: then nothing
        that they remember counts, and `settle` compares what they ask for.

        Args:
            memo: what this rank remembers; None where it does not.
            key: what tells its start from others; None where nothing is remembered of it.
        """

        def changed(chunks: Sequence[int]) -> list[int]:
            return [chunk for chunk in chunks if memo is not None and not memo.holds([chunk])]

        num_chunks, version = (0, None) if memo is None else (memo.num_chunks, memo.crc32)
        found = self._look_and_say(num_chunks, changed, None, _Ends.if_nothing_is_missing, version=[key, version])
        return found.is_whole

    def attend(self) -> None:
        """Collective over the group: `holds` and `settle`, as often as the others do, for a rank that wants nothing."""
        while not (found := self._look_and_say(0, lambda _share: [], None, _Ends.always)).is_last:
            if not found.is_recall:
                self._group.barrier()

    def _look_and_say(
        self,
        count: int,
        look: Callable[[Sequence[int]], list[int]],
        request: Request | None,
        ends: "_Ends",
        *,
        version: Sequence[str | int | None] = (),
        names: str = "",
    ) -> _Found:
        """What all ranks know. Each looks at its share; where some want nothing, or caches differ, at more.

        Args:
            count: things to look for.
            look: given numbers of some, gives those that are missing.
            request: what this rank asks for, where that is to be compared.
            ends: whether nothing else follows.
            version: of what is remembered; ranks that remember nothing, or not the same, miss something.
            names: of the entries; ranks whose names differ share no work.
        """
        rank, size = self._group.rank, self._group.size
        self._share = hashlib.sha256(f"{self._cache}\n{names}".encode()).hexdigest()[:12]
        own: dict[str, Any] = {
            "ends": ends.value,
            "wants": self._wants,
            "missing": look(range(rank, count, size)) if self._wants else [],
            "cache": self._share,
        }
        if request is not None:
            own["digests"] = [request.digest(has_to_agree=True), request.digest(has_to_agree=False)]
        if version:
            own["version"] = list(version)
        said: dict[str, Any] = self._group.combine(own, _sum_up)
        self._check_agreement(request, said)
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

    def _check_agreement(self, request: Request | None, said: Mapping[str, Any]) -> None:
        """Collective over the group: raise on every rank, or warn, if two ranks ask for different things."""
        if said["at_odds"] is not None:
            first, second = said["at_odds"]
            msg = f"every rank must build as many datasets, but rank {second} is not at the same point as rank {first}"
            raise CollectiveError(msg)
        if said["different"] is not None:
            found = self._compare(request, said["different"], has_to_agree=True)
            msg = f"every rank must ask for the same datasets, but {found}"
            raise CollectiveError(msg)
        if said["unlike"] is not None and self._warned != said["unlike"]:
            self._warned = said["unlike"]
            logger.warning(
                "ranks ask for datasets that may differ, as nothing says what is in them: %s",
                self._compare(request, said["unlike"], has_to_agree=False),
            )

    def _compare(self, request: Request | None, ranks: Sequence[int], *, has_to_agree: bool) -> Difference:
        """Collective over the group: the first thing that two ranks ask for differently."""
        own = request if self._group.rank in ranks else None
        digests = None if own is None else own.digests(has_to_agree=has_to_agree)
        number = self._group.combine(digests, first_difference)
        described = None if own is None else own.describe(number)
        names, field, values = self._group.combine(described, find_difference)
        first, second = sorted(ranks)
        return Difference((first, second), tuple(names), field, tuple(values))

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
            taken=_taken(parts, self._group.counter(self._share)) if parts else (),
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
    of them has more to ask for, and `is_recall`, whether that depends on what is missing; `at_odds`, two that are not
    at the same point; `different`, two that want different datasets, and `unlike`, two that may; `is_unknown`, whether
    ranks of a cache do not remember the same; `missing`, what was looked for and is not there.
    """
    caches: dict[str, list[int]] = {}
    versions, keys = set(), set()
    for rank, one in enumerate(said):
        if one["wants"]:
            caches.setdefault(one["cache"], []).append(rank)
            key, version = one.get("version", (None, None))
            versions.add((one["cache"], version))
            keys.add(key)
    builders = sorted(chain.from_iterable(caches.values()))
    ends = {said[rank]["ends"] for rank in builders}
    is_recall = ends == {_Ends.if_nothing_is_missing.value}
    digests = [one.get("digests", ("", "")) for one in said]
    different = _first_unlike([must for must, _ in digests], builders)
    return {
        "at_odds": None if different else _first_unlike([one["ends"] for one in said], builders),
        "caches": None if list(map(len, caches.values())) == [len(said)] else list(caches.values()),
        "is_last": ends <= {_Ends.always.value},
        "is_recall": is_recall,
        "different": different,
        "unlike": _first_unlike([may for _, may in digests], builders),
        "is_unknown": is_recall
        and (len(keys) > 1 or len(versions) > len(caches) or any(version is None for _, version in versions)),
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


def _first_unlike(said: Sequence[Any], ranks: Sequence[int]) -> list[int] | None:
    """The first of these ranks, and the first that said something else."""
    return next(([ranks[0], rank] for rank in ranks if said[rank] != said[ranks[0]]), None)
