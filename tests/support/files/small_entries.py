"""Entries of the cache that are built in no time, and what tells them apart."""

import contextlib
from typing import Any, NamedTuple

import numpy as np

from trackbed.cache import ArraySpec, Entry, Kind, LazyArrays, Request, build_batch, take_inventory
from trackbed.cache import find_problems as problems_in
from trackbed.datasets.start import Start, open_index

STEM = "0123456789abcdef0123456789abcdef-GPTDataset-train"
ARRAYS = ("document_index", "sample_index", "shuffle_index")


def entry(folder, *, seed=1, stem=STEM, megatron=True):
    """An entry whose name, description and shapes say nothing of its seed."""
    return Entry(
        directory=folder,
        stem=stem,
        description="what it is",
        arrays=ARRAYS,
        decisions={"seed": seed},
        megatron=megatron,
    )


def arrays(seed=1, rows=10):
    """Arrays in which every number is the seed."""
    return {
        "document_index": np.full(rows, seed, np.int32),
        "sample_index": np.full((rows + 1, 2), seed, np.int32),
        "shuffle_index": np.full(rows, seed, np.uint32),
    }


def expected(rows=10):
    return {name: ArraySpec(array.dtype, array.shape) for name, array in arrays(1, rows).items()}


class Small(NamedTuple):
    """Ingredients of a `SmallKind`."""

    seed: int
    kind: Any

    def expected(self):
        return expected(self.kind.rows(self.seed))

    def cost(self):
        return self.kind.cost_of_one


class SmallKind(Kind):
    """Entries that are built in batches: the ingredients are a seed; 0 stands for an entry that is not small.

    Args:
        build_small: gives the arrays for many seeds, None for one that is not small.
        rows: rows of the arrays of a seed.
        cost: estimated nanoseconds of an entry.
    """

    def __init__(self, build_small=None, rows=lambda seed: 10, cost=0.0):
        super().__init__()
        self._build_small = build_small or self._make
        self.rows = rows
        self.cost_of_one = cost
        self.alone = 0

    def request(self, wanted, seed):
        return Request(wanted, self, Small(seed, self))

    def _make(self, seeds):
        return [arrays(seed, self.rows(seed)) if seed else None for seed in seeds]

    def build(self, requests, allocate):
        first, count = 0, 1
        while first < len(requests):
            some = requests[first : first + count]
            made = self._build_small([one.ingredients.seed for one in some])
            if done := [(one, found) for one, found in zip(some, made, strict=True) if found is not None]:
                yield done
            for one in (one for one, found in zip(some, made, strict=True) if found is None):
                self.alone += 1
                seed = one.ingredients.seed
                yield [(one, arrays(seed, self.rows(seed)))]
            first, count = first + len(some), min(2 * count, 16)

    def is_small(self, request):
        return True


class Alone(NamedTuple):
    """Ingredients of an entry that `make` builds."""

    make: Any
    wants: Any
    nanoseconds: float

    def build(self, allocate):
        return self.make(allocate)

    def expected(self):
        return self.wants()

    def cost(self):
        return self.nanoseconds


def request(wanted, *, build, wants=expected, is_blend=False, cost=0.0):
    """The request for an entry that `build` makes alone."""
    return Request(wanted, Kind(is_blend=is_blend), Alone(build, wants, cost))


def open_(folder, *, seed=1, rows=10, build=None, **options):
    """Open or build an entry."""
    wanted = entry(folder, seed=seed, **options)
    build = build or (lambda _allocate: arrays(seed, rows))
    return open_index(request(wanted, build=build, wants=lambda: expected(rows)))


@contextlib.contextmanager
def collecting():
    """Inside the block, entries are requested but neither found nor built; gives the list of them."""
    start = Start()
    with start.active():
        yield start.requested


def lazy(wanted):
    """Arrays that must be found or built by others."""
    return LazyArrays(wanted, None)


def build_all(lazies):
    """Build those entries in one batch that were not found."""
    lazies = [one for one in lazies if not one.is_resolved]
    by_request = {id(one.request): one for one in lazies}
    for built, found in build_batch([one.request for one in lazies], [one.found for one in lazies]):
        by_request[id(built)].note(found)


def seeds_in(found):
    """The numbers that arrays hold: the one seed, unless entries were mixed."""
    return {int(number) for name in ARRAYS for number in np.unique(found[name])}


def problems(folder):
    """What is wrong in a cache."""
    return list(problems_in(take_inventory(str(folder))))


def files_in(folder):
    """Every file below a folder but notes, uses and what starts remember, by its path in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name not in ("notes", "uses")
    }
