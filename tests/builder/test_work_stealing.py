"""What a rank does that is done early: it takes over from those that are not."""

import threading
import time
from collections import Counter

import pytest

from small_entries import arrays, entry, expected, problems
from trackbed.builder.coordinator import Builders
from trackbed.builder.executor import parts_of
from trackbed.cache import Recipe, bundles_of, collecting, open_or_build
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError

ROWS = 10
COST = 3e7  # more than a part has at least


def pending_of(folder, builds, *, cost=COST, small=False, blends=0):
    """One entry for each number; `builds` is called with that before it is built."""

    def build_one(number):
        builds(number)
        return arrays(1, ROWS)

    def build_together(numbers):
        return [build_one(number) for number in numbers]

    with collecting() as pending:
        for number in range(40):
            open_or_build(
                entry(folder, stem=f"{number:032x}-GPTDataset-train"),
                expected=lambda: expected(ROWS),
                build=lambda _allocate, number=number: build_one(number),
                cost=cost,
                is_blend=number < blends,
                recipe=Recipe(build_together, number) if small else None,
            )
    return pending


def build(folder, builds_on, *, num_ranks=2, **options):
    """Settle on each rank; `builds_on(rank, number)` is called before an entry is built. Returns what each told."""

    def work(group):
        told = []
        with group.guarded("building") as step:
            builders = Builders(group, wants=True, num_threads=1, progress=lambda *part: told.append(part))
            pending = pending_of(folder, lambda number: (step.poll(0), builds_on(group.rank, number)), **options)
            builders.settle(pending, is_last=True)
        assert all(one.find() for one in pending)
        return told

    return run_ranks(num_ranks, work, timeout_seconds=20)


@pytest.mark.parametrize("small", [False, True])
def test_a_rank_that_is_done_early_builds_what_others_have_not_begun(tmp_path, small):
    built, lock = [], threading.Lock()

    def builds_on(rank, number):
        with lock:
            built.append((rank, number))
        if rank == 1:
            time.sleep(0.05)

    build(tmp_path / "cache", builds_on, small=small)
    by_rank = Counter(rank for rank, _ in built)
    assert sorted(number for _, number in built) == list(range(40))
    assert by_rank[1] >= 5  # its own quarter of its fair part
    assert by_rank[0] > (20 if small else 30)  # a bundle that the slow one has begun is long
    assert problems(tmp_path / "cache") == []


def test_what_takes_next_to_no_time_is_built_as_planned(tmp_path):
    built = []
    build(tmp_path / "cache", lambda rank, number: built.append((rank, number)), cost=1e6)
    assert Counter(rank for rank, _ in built) == {0: 20, 1: 20}


def test_the_others_build_on_while_a_blend_keeps_one_rank(tmp_path):
    done = threading.Event()
    built = []

    def builds_on(rank, number):
        if number == 0:
            assert done.wait(10)
        built.append((rank, number))
        if len(built) >= 36:  # all but the blend, and three that are its rank's own
            done.set()

    build(tmp_path / "cache", builds_on, num_ranks=3, blends=1)
    assert sorted(number for _, number in built) == list(range(40))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_what_was_taken_over_is_raised_on_every_rank(tmp_path, failing):
    began = threading.Event()

    def builds_on(rank, number):
        if rank != failing:
            assert began.wait(10)
            time.sleep(0.02)
        elif number >= 25:  # nobody's own: each has five of the first ten
            began.set()
            msg = "it broke"
            raise ValueError(msg)

    with pytest.raises(CollectiveError, match=f"rank {failing}: ValueError: it broke"):
        build(tmp_path / "cache", lambda rank, number: (builds_on(rank, number), began.set() if number > 22 else None))


def test_the_progress_of_all_ranks_adds_up_to_the_plan(tmp_path):
    told = build(tmp_path / "cache", lambda rank, _number: time.sleep(0.02 * rank))
    assert sum(part[-1][0] for part in told) == sum(part[-1][1] for part in told) == 40
    assert sum(part[-1][2] for part in told) == pytest.approx(2.0)
    assert told[0][-1][2] > 1.0


@pytest.mark.parametrize(("cost", "most"), [(1e9, 1), (1e7, 2), (1e4, 40)])
def test_parts_hold_every_entry_once_in_its_order_and_are_not_too_small(tmp_path, cost, most):
    pending = pending_of(tmp_path / "cache", lambda _number: None, cost=cost)
    parts = parts_of(pending, 2)
    assert [one for part in parts for bundle in part for one in bundle] == list(pending)
    assert [len(part) for part in parts] == [most] * (40 // most)


def test_bundles_are_not_cut_by_parts(tmp_path):
    pending = pending_of(tmp_path / "cache", lambda _number: None, small=True)
    bundles = bundles_of(pending)
    assert [len(bundle) for bundle in bundles] == [1, 2, 4, 8, 16, 9]
    assert [bundle for part in parts_of(pending, 2) for bundle in part] == bundles
