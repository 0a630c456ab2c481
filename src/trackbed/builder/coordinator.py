"""Lookup of the indices of a start by all ranks, and building those that are missing.

Shapes: E indices of a start, in the same order on every rank; R ranks.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Final, TypeVar

from trackbed.builder.agreement import RankRequest, describe_unlike_items, unlike_item
from trackbed.builder.executor import Executor, Progress
from trackbed.cache import LazyArrays, LookupResult, Request, await_visible, look_up
from trackbed.comm import Group
from trackbed.errors import CollectiveError

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")

_LEAST_SHARED: Final = 2e8
"""Nanoseconds of a rank's fair part below which chunks are dealt out in turn, without asking."""
_UNSEEN: Final = (
    "another rank found or built it: see that path_to_cache leads to the same folder on every host, "
    "or wait until the file system shows it"
)


@dataclass(frozen=True, slots=True)
class _LookupOutcome:
    """Result of a lookup by all ranks, as one of them sees it."""

    missing: Sequence[int]
    """Indices that are not in this rank's cache."""
    builders: Sequence[int]
    """Ranks that want datasets from this rank's cache; none if it wants none."""
    num_missing: int
    """Number of indices that are missing, in all caches."""
    num_caches: int
    is_last: bool
    """True if no rank has another round."""


class Coordinator:
    """The ranks of a group; the ranks that want datasets build the indices that are missing.

    Ranks that share a cache share the work. Where hosts have caches of their own, the ranks of each build all of it.

    Args:
        group: all ranks.
        num_threads: threads of this rank, at least 1.
        cache: identifies this rank's cache.
        progress: called after each index that this rank has built.
    """

    def __init__(self, group: Group, *, num_threads: int, cache: str = "", progress: Progress | None = None) -> None:
        self._group = group
        self._progress = progress
        self._num_threads = num_threads
        self._cache = hashlib.sha256(cache.encode()).hexdigest()[:8]
        self._warned: list[int] | None = None

    def settle(
        self,
        indices: Sequence[LazyArrays],
        request: Callable[[], RankRequest] = lambda: RankRequest(()),
        *,
        is_last: bool,
    ) -> None:
        """Collective over the group: finds or builds every index.

        When this returns, another rank may still be building its part, unless `is_last` is False.

        Each rank looks up its share of the indices and says what is missing. Indices that others found or built are
        opened when they are first read.

        Args:
            indices: `[E]` indices that this rank wants.
            request: gives what this rank asks for, to compare with other ranks; not called in a group of one.
            is_last: True if no other round follows.
        """
        is_alone = self._group.size == 1
        names = "" if is_alone else "\n".join(one.entry.stem for one in indices)
        share = hashlib.sha256(f"{self._cache}\n{names}".encode()).hexdigest()[:12]
        outcome = self._look(indices, None if is_alone else request(), share, is_last=is_last)
        self._build([indices[number] for number in outcome.missing], outcome, share)
        if not is_alone:
            for one in indices:
                one.find_or_build = _await_others
        if not is_last:
            self._group.barrier()

    def attend(self) -> None:
        """Collective over the group: takes part in `settle` as often as the others, for a rank that wants nothing.

        Such a rank looks at no data, and builds nothing.
        """
        while not self._look((), None, "", is_last=True).is_last:
            self._group.barrier()

    def attend_once(self) -> None:
        """Collective over the group: takes part in one `settle` after which another round follows."""
        self._look((), None, "", is_last=True)
        self._group.barrier()

    def take_turns(self, construct: Callable[[], _Made] | None) -> _Made | None:
        """Collective over the group: calls `construct` on one rank of each cache, the lowest, and then on the others.

        Args:
            construct: reads files that it has written on the first rank; None on a rank that wants nothing.

        Returns:
            What this rank has made; None if it wants nothing.
        """
        cache = None if construct is None else self._cache
        first = self._group.combine(cache, _first_by_cache).get(cache)
        made = construct() if construct is not None and first == self._group.rank else None
        self._group.barrier()
        return construct() if construct is not None and first != self._group.rank else made

    def _look(
        self, indices: Sequence[LazyArrays], request: RankRequest | None, share: str, *, is_last: bool
    ) -> _LookupOutcome:
        """Collective over the group: one exchange if all ranks want datasets from one cache, else two.

        Args:
            indices: indices to look up.
            request: what this rank asks for, if that is to be compared.
            share: the same on ranks that share their work, and on no others; empty if this rank wants no datasets.
            is_last: True if no other round follows.
        """
        rank, size = self._group.rank, self._group.size
        report: dict[str, Any] = {
            "is_last": is_last,
            "missing": find_missing(indices, range(rank, len(indices), size)),
            "cache": share,
        }
        if request is not None:
            report["digests"] = [request.digest(has_to_agree=True), request.digest(has_to_agree=False)]
        combined: dict[str, Any] = self._group.combine(report, _sum_up)
        self._check_agreement(request, combined)
        if combined["caches"] is None:
            return _LookupOutcome(combined["missing"], range(size), len(combined["missing"]), 1, combined["is_last"])
        caches: dict[str, list[int]] = combined["caches"]
        looked = {*chain.from_iterable(caches.values())} if len(caches) == 1 else set()
        left = [number for number in range(len(indices)) if number % size not in looked]
        builders = caches.get(share, [])
        found = find_missing(indices, left[builders.index(rank) :: len(builders)]) if builders else []
        by_cache: dict[str, list[int]] = self._group.combine([share, found], _by_cache)
        known = combined["missing"] if looked else []
        missing = sorted([*known, *by_cache.get(share, [])])
        num_missing = len(known) + sum(map(len, by_cache.values()))
        return _LookupOutcome(missing, builders, num_missing, max(len(caches), 1), combined["is_last"])

    def _check_agreement(self, request: RankRequest | None, combined: Mapping[str, Any]) -> None:
        """Collective over the group: raises on every rank, or warns, if two ranks ask for different things."""
        if combined["at_odds"] is not None:
            first, second = combined["at_odds"]
            raise CollectiveError(
                f"every rank must build as many datasets, but rank {second} is not at the same point as rank {first}"
            )
        if combined["different"] is not None:
            found = self._compare(request, combined["different"], has_to_agree=True)
            raise CollectiveError(f"every rank must ask for the same datasets, but {found}")
        if combined["unlike"] is not None and self._warned != combined["unlike"]:
            self._warned = combined["unlike"]
            logger.warning(
                "ranks ask for datasets that may differ, as nothing says what is in them: %s",
                self._compare(request, combined["unlike"], has_to_agree=False),
            )

    def _compare(self, request: RankRequest | None, ranks: Sequence[int], *, has_to_agree: bool) -> str:
        """Collective over the group: the first difference between what two ranks ask for."""
        own = request if self._group.rank in ranks else None
        digests = None if own is None else own.digests(has_to_agree=has_to_agree)
        number = self._group.combine(digests, unlike_item)
        described = None if own is None else own.describe(number)
        difference: str = self._group.combine(described, describe_unlike_items)
        return difference

    def _build(self, missing: Sequence[LazyArrays], outcome: _LookupOutcome, share: str) -> None:
        num_builders = len(outcome.builders)
        executor = Executor(
            missing,
            num_ranks=num_builders,
            num_threads=self._num_threads,
            progress=self._progress,
            num_total=outcome.num_missing,
            share=1 / outcome.num_caches,
        )
        if not missing:
            return
        if num_builders == 1:
            executor.run()
        elif executor.cost / num_builders < _LEAST_SHARED:
            executor.run(count(outcome.builders.index(self._group.rank), num_builders).__next__)
        else:
            executor.run(self._group.counter(share))


def find_missing(
    indices: Sequence[LazyArrays], share: Sequence[int] | None = None, *, leave_notes: bool = True
) -> list[int]:
    """Looks up a share of the indices, by default all. Returns the numbers of the indices that are not in the cache."""
    numbers = range(len(indices)) if share is None else share
    requests = {number: one for number in numbers if (one := indices[number].request) is not None}
    for number, found in zip(requests, look_up(list(requests.values()), leave_notes=leave_notes), strict=True):
        indices[number].note(found)
    return [number for number in requests if not indices[number].is_resolved]


def _await_others(request: Request, _found: LookupResult | None) -> LookupResult:
    return await_visible(request, advice=_UNSEEN)


def _sum_up(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines what all ranks said, in a few bytes however many they are.

    `caches` are the ranks that want datasets, by cache, or None if all do, from one; `is_last` is true if none of them
    has another round; `at_odds`, two that are not at the same point; `different`, two that want different datasets, and
    `unlike`, two that may; `missing`, what was looked up and is not there.
    """
    caches: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report["cache"]:
            caches.setdefault(report["cache"], []).append(rank)
    builders = sorted(chain.from_iterable(caches.values()))
    digests = [report.get("digests", ("", "")) for report in reports]
    different = _first_unlike([must for must, _ in digests], builders)
    return {
        "at_odds": None if different else _first_unlike([report["is_last"] for report in reports], builders),
        "caches": None if list(map(len, caches.values())) == [len(reports)] else caches,
        "is_last": all(reports[rank]["is_last"] for rank in builders),
        "different": different,
        "unlike": _first_unlike([may for _, may in digests], builders),
        "missing": sorted(chain.from_iterable(report["missing"] for report in reports)),
    }


def _by_cache(said: list[tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Combines what is missing, by cache."""
    missing: dict[str, list[int]] = {}
    for cache, found in said:
        missing.setdefault(cache, []).extend(found)
    return missing


def _first_by_cache(said: list[str | None]) -> dict[str, int]:
    """Returns the lowest rank of each cache."""
    return {cache: said.index(cache) for cache in said if cache is not None}


def _first_unlike(said: Sequence[Any], ranks: Sequence[int]) -> list[int] | None:
    """Returns the first of these ranks, and the first one that said something else."""
    return next(([ranks[0], rank] for rank in ranks if said[rank] != said[ranks[0]]), None)
