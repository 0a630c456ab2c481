"""A failure of one of three processes is raised on all of them, with its rank and its words."""

import itertools
import json
from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

SCRIPT = Path(__file__).with_name("failing_rank.py")
RANKS = 3
MESSAGES = {
    "exception": "Boom: the original message",
    "exception in backward": "Boom: the original message",
    "nan": "gradients must be finite, but that of 5.bias in bucket 0 is NaN: its norm is nan",
    "inf": "gradients must be finite, but that of",
    "missing gradient": "all parameters must have a gradient before finish_grad_sync(), but 2.bias in bucket 1",
    "one backward too many": "all gradients must arrive before their bucket is reduced, but one of 5.bias",
    "out of order": "must be called before another finish_grad_sync(), but was not",
    "one step less": "has left the training loop",
    "another model": "has parameter '0.weight' of shape [40, 40]",
    "other options": "has option bucket_size = 5000, and rank",
}
WAYS = ("shared_memory", "torch")


def run(trials, timeout, limit, gone=None):
    """Outcome of each trial on each rank but the one that is gone."""
    return run_script(SCRIPT, RANKS, json.dumps(trials), timeout, limit_seconds=limit, gone=gone)


def check(trial, results):
    """Checks what one trial left on each rank."""
    kind, who, _ = trial
    assert [result["error"] for result in results] == ["CollectiveError"] * RANKS, (trial, results)
    for result in results:
        assert f"rank {who}" in result["text"], (trial, result)
        assert MESSAGES[kind] in result["text"], (trial, result)
        assert result["raised"] - results[who]["failed"][0] < 2.0, (trial, result)


def memory_left_behind(trials):
    """Processes of these trials that map memory."""
    left = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        if "memfd:trackbed-" in text and json.dumps(trials) in (maps.parent / "cmdline").read_text():
            left.append(maps)
    return left


def test_each_kind_of_failure_is_raised_on_all_ranks():
    trials = [(kind, number % RANKS, WAYS[number % 2]) for number, kind in enumerate(MESSAGES)]
    results = run(trials, timeout=30, limit=120)
    for number, trial in enumerate(trials):
        check(trial, [rank[number] for rank in results])
    assert memory_left_behind(trials) == []


@pytest.mark.slow
def test_all_of_sixty_failures_are_raised_on_all_ranks():
    trials = list(itertools.product(MESSAGES, range(RANKS), WAYS))
    results = run(trials, timeout=30, limit=400)
    assert len(trials) == 60
    for number, trial in enumerate(trials):
        check(trial, [rank[number] for rank in results])
    assert memory_left_behind(trials) == []


@pytest.mark.parametrize(
    ("kind", "who", "collectives"),
    [
        pytest.param("kill", 2, "shared_memory", marks=pytest.mark.slow),
        pytest.param("hang", 1, "torch", marks=pytest.mark.slow),
        ("kill, which NCCL reports", 1, "torch"),
        pytest.param("kill", 1, "torch", marks=pytest.mark.slow),
        pytest.param("hang", 2, "shared_memory", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_is_named_within_the_timeout_and_a_fifth(kind, who, collectives):
    timeout = 12.0  # the process with the store waits up to two more seconds for the others
    for (result,) in run([(kind, who, collectives)], timeout, limit=60, gone=who):
        assert result["error"] == "CollectiveError"
        assert f"rank {who}" in result["text"], result
        assert result["raised"] - result["started"][0] < 1.2 * timeout, result
        if "NCCL" in kind:
            assert "rank 1 has ended" in result["text"], result
            assert result["raised"] - result["started"][0] < 3.0, result
