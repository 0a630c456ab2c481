"""What a rank does that is done early: it takes over from those that are not."""

import threading
import time
from collections import Counter

import pytest

from tests.support.files.small_entries import SmallKind, arrays, entry, expected, lazy, problems, request
from trackbed.builder.coordinator import Coordinator
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError

ROWS = 10
COST = 3e7  # more than a part has at least


def wanted_of(folder, builds, *, cost=COST, small=False, blends=0):
    """One entry for each number; `builds` is called with that before it is built."""

    def build_one(number):
        builds(number)
        return arrays(1, ROWS)

    kind = SmallKind(lambda numbers: [build_one(number) for number in numbers], lambda _: ROWS, cost)
    entries = [entry(folder, stem=f"{number:032x}-GPTDataset-train") for number in range(40)]
    return [
        lazy(
            kind.request(one, number)
            if small
            else request(
                one,
                build=lambda _allocate, number=number: build_one(number),
                wants=lambda: expected(ROWS),
                cost=cost,
                is_blend=number < blends,
            )
        )
        for number, one in enumerate(entries)
    ]


def build(folder, builds_on, *, num_ranks=2, **options):
    """Settle on each rank; `builds_on(rank, number)` is called before an entry is built. Returns what each told."""

    def work(group):
        told = []
        with group.guarded("building") as step:
            coordinator = Coordinator(group, num_threads=1, progress=lambda *part: told.append(part))
            wanted = wanted_of(folder, lambda number: (step.poll(0), builds_on(group.rank, number)), **options)
            coordinator.settle(wanted, is_last=True)
        assert all(one.resolve() for one in wanted)
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
    assert by_rank[1] >= 1
    assert by_rank[0] > 30
    assert problems(tmp_path / "cache") == []


def test_what_takes_little_time_is_dealt_out_without_asking(tmp_path):
    built = []
    build(tmp_path / "cache", lambda rank, number: built.append((rank, number)), cost=5e6)
    assert sorted(built) == sorted((number // 4 % 2, number) for number in range(40))  # a chunk takes 20 ms


def test_the_others_build_on_while_a_blend_keeps_one_rank(tmp_path):
    done = threading.Event()
    built = []

    def builds_on(rank, number):
        if number == 0:
            assert done.wait(10)
        built.append((rank, number))
        if len(built) == 39:  # all but the blend
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
        elif number >= 25:
            began.set()
            raise ValueError("it broke")

    with pytest.raises(CollectiveError, match=f"rank {failing}: ValueError: it broke"):
        build(tmp_path / "cache", lambda rank, number: (builds_on(rank, number), began.set() if number > 22 else None))


def test_the_progress_of_all_ranks_adds_up_to_the_whole(tmp_path):
    told = build(tmp_path / "cache", lambda rank, _number: time.sleep(0.02 * rank))
    assert sum(part[-1][0] for part in told) == 40
    assert [part[-1][1] for part in told] == [40, 40]
    assert sum(part[-1][2] for part in told) == pytest.approx(1.0)
    assert told[0][-1][2] > 0.5
