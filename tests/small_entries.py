"""Entries of the cache that are built in no time, and what tells them apart."""

import numpy as np

from trackbed.cache import ArraySpec, Entry, open_or_build, take_inventory
from trackbed.cache import find_problems as problems_in

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


def open_(folder, *, seed=1, rows=10, build=None, **options):
    """Open or build an entry."""
    wanted = entry(folder, seed=seed, **options)
    return open_or_build(wanted, expected=lambda: expected(rows), build=build or (lambda _allocate: arrays(seed, rows)))


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
        if path.is_file() and path.parent.name not in ("notes", "uses", "starts")
    }
