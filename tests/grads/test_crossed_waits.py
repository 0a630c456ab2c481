"""Ranks that wait for each other at different operations of a training loop raise within two seconds, and name both."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, permutations
from pathlib import Path

import pytest
import torch

import trackbed
from tests.grads.crossing import OPERATIONS, training
from tests.support.processes.launching import run_script
from trackbed.comm import crossed_waits, run_ranks
from trackbed.comm.store import MemoryStore
from trackbed.errors import CollectiveError, TrackbedError

WORDS = {
    "step": "reduction of gradients|reduce-scatter of bucket|gradients of bucket|is at the (reduction|all-reduce|norm)",
    "save": r"\bsave\b",
    "load": r"\bload\b",
    "load_sharded_state": "load_sharded_state",
    "sharded_state": r"\bsharded_state",
    "full_state_dict": "the state of the optimizer",
    "latest_checkpoint": "latest_checkpoint",
    "agree": r"agree\(\)",
    "leave": r"the end of guarded\(\)|has left the training loop",
}
MOST_SECONDS = 2.0


def check(pair, rank, text, seconds, most_seconds=MOST_SECONDS):
    assert text is not None, (pair, rank)
    assert seconds <= most_seconds, (pair, rank, seconds, text)
    for operation in pair:
        assert re.search(WORDS[operation], text), (pair, rank, text)
    assert re.search(r"rank 0\b", text), (pair, text)
    assert re.search(r"ranks? 1\b", text), (pair, text)


def outcomes_of(size, first, second, folder):
    """Error and seconds of each rank, of which the first is at one operation and the others are at another."""
    outcomes = {}

    def work(group):
        began = 0.0
        try:
            with training(folder, group) as run:
                began = time.monotonic()
                OPERATIONS[first if group.rank == 0 else second](run)
        except TrackbedError as error:
            outcomes[group.rank] = str(error), time.monotonic() - began

    run_ranks(size, work, timeout_seconds=60)
    return outcomes


@pytest.mark.parametrize("size", [2, 3])
def test_threads_at_different_operations_are_told_of_both(size, tmp_path):
    pairs = list(combinations(OPERATIONS, 2))[:: size - 1]
    with ThreadPoolExecutor(12) as pool:
        futures = [
            pool.submit(outcomes_of, size, *pair, tmp_path / f"pair-{number}") for number, pair in enumerate(pairs)
        ]
    for pair, future in zip(pairs, futures, strict=True):
        outcomes = future.result()
        assert sorted(outcomes) == list(range(size)), pair
        for rank, (text, seconds) in outcomes.items():
            check(pair, rank, text, seconds, most_seconds=8.0)  # dozens of them wait for the same processors


@pytest.mark.parametrize(
    ("size", "pairs", "collectives"),
    [
        pytest.param(2, [("save", "step"), ("sharded_state", "leave")], "auto", marks=pytest.mark.slow),
        (2, [("save", "step"), ("sharded_state", "leave")], "torch"),
        pytest.param(2, list(combinations(OPERATIONS, 2)), "auto", marks=pytest.mark.slow, id="2-all"),
        pytest.param(3, list(permutations(OPERATIONS, 2)), "auto", marks=pytest.mark.slow, id="3-all"),
    ],
)
def test_processes_at_different_operations_are_told_of_both(size, pairs, collectives, tmp_path):
    check_processes(size, pairs, collectives, tmp_path)


# A job for each pair: what gloo's collectives have begun and ranks gave up may disturb those of the next pair.
@pytest.mark.slow
@pytest.mark.parametrize("pair", list(combinations(OPERATIONS, 2)), ids="-".join)
def test_processes_that_reduce_over_gloo_are_told_of_both(pair, tmp_path):
    check_processes(2, [pair], "torch", tmp_path)


def check_processes(size, pairs, collectives, folder):
    script = Path(__file__).parent / "crossed_rank.py"
    named = json.dumps([[*pair, collectives] for pair in pairs])
    results = run_script(script, size, folder, limit_seconds=30 + 8 * len(pairs), PAIRS=named)
    for lines in results:
        assert len(lines) == len(pairs)
        for pair, (rank, text, seconds) in zip(pairs, lines, strict=True):
            check(pair, rank, text, seconds)


def test_two_models_in_one_loop_are_watched_together(tmp_path):
    def work(group):
        with training(tmp_path / "first", group) as first, training(tmp_path / "second", group) as second:
            if group.rank == 0:
                second.step()
            else:
                first.step()

    with pytest.raises(CollectiveError, match="each for the other"):
        run_ranks(2, work, timeout_seconds=20)


def test_agree_is_true_on_every_rank_if_it_is_on_any(tmp_path):
    def work(group):
        with training(tmp_path, group) as run:
            return [run.model.agree(group.rank in those) for those in ((), (1,), (0, 2), (0, 1, 2))]

    assert run_ranks(3, work) == [[False, True, True, True]] * 3
    assert trackbed.DistributedDataParallel(torch.nn.Linear(2, 2)).agree(True) is True


class CountingStore:
    """One rank's way to a store in memory, which counts requests."""

    def __init__(self, store):
        self._store = store
        self.num_requests = 0

    def __getattr__(self, name):
        method = getattr(self._store, name)
        if name in {"set", "set_first", "get", "get_all", "has", "add", "delete"}:
            self.num_requests += 1
        return method


def test_waits_below_half_a_second_make_no_request(tmp_path):
    """Each of the steps waits for the other rank, which sleeps; a group of its own counts."""

    def requests_of(pause):
        ways, shared = [], MemoryStore()

        def connect():
            ways.append(CountingStore(shared))
            return ways[-1]

        def work(group):
            module = torch.nn.Linear(2, 2)
            model = trackbed.DistributedDataParallel(module, process_group=group)
            optimizer = trackbed.DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
            with model.guarded():
                model.agree(False)
                before = sum(way.num_requests for way in ways)
                model.agree(False)
                for step in range(4):
                    optimizer.zero_grad()
                    model(torch.ones(1, 2)).sum().backward()
                    time.sleep(pause if step % 2 == group.rank else 0)
                    optimizer.step()
                model.agree(False)
                after = sum(way.num_requests for way in ways)
                model.agree(False)
                return after - before

        return max(run_ranks(2, work, connect=connect, timeout_seconds=3600))

    assert requests_of(0.2) == 0
    assert 0 < requests_of(0.8) <= 4 * 10


@pytest.mark.parametrize(
    ("num_pauses", "longest"), [(60, 0.2), pytest.param(100, 5.0, marks=pytest.mark.slow, id="full")]
)
def test_ranks_that_pause_anywhere_raise_no_alarm(num_pauses, longest, tmp_path, monkeypatch):
    """Saves, loads and steps of three ranks, each of which sleeps at random places, also between its requests."""
    if longest < 1:  # as with waits of half a second and pauses of five
        monkeypatch.setattr(crossed_waits, "_SILENT_SECONDS", 0.02)
        monkeypatch.setattr(crossed_waits, "_READ_SECONDS", 0.028)
        monkeypatch.setattr(crossed_waits, "CHECK_SECONDS", 0.01)
        monkeypatch.setattr("trackbed.comm.rendezvous.CHECK_SECONDS", 0.01)
    draws = random.Random(0)
    shared = MemoryStore()
    readings = []
    find = crossed_waits.find_crossing
    monkeypatch.setattr(crossed_waits, "find_crossing", lambda records: readings.append(len(records)) or find(records))
    pauses = [0]

    def pause(chance):
        if draws.random() < chance and pauses[0] < num_pauses:
            pauses[0] += 1
            time.sleep(draws.random() * longest)

    class PausingStore(CountingStore):
        def __getattr__(self, name):
            pause(0.01)
            return super().__getattr__(name)

    def work(group):
        others = group.child("checkpoints")
        with training(tmp_path, group) as run:
            run.group = others
            for number in range(2, 400):
                if run.model.agree(pauses[0] >= num_pauses):
                    return number
                pause(0.3)
                run.step()
                pause(0.3)
                if number % 3 == 0:
                    trackbed.save({"step": number}, tmp_path / f"step-{number}", group=others)
                    pause(0.3)
                    trackbed.load(tmp_path / f"step-{number}", group=others)
                if number % 4 == 0:
                    pause(0.3)
                    run.state()
                    assert trackbed.latest_checkpoint(tmp_path, group=others) is not None
        return 400

    counts = run_ranks(3, work, connect=lambda: PausingStore(shared), timeout_seconds=600)
    assert len(set(counts)) == 1
    assert pauses[0] >= num_pauses
    assert max(readings) == 3  # what all ranks wrote was read, and found in order
