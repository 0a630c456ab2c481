"""Processes that share nothing but the folder of the cache, and such that are killed: the bytes are always the same."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, tokens_of, write_pairs
from tests.support.files.small_entries import files_in, problems

pytestmark = pytest.mark.dist

SIZES = (300, 20, 20)

# Builds the cache of each round at the same moment as the others do.
BUILDER = """
import os, sys, time
from pathlib import Path
base, first, rounds, crowd = Path(sys.argv[1]), *map(int, sys.argv[2:5])
sys.path.insert(0, sys.argv[5])
import torch
torch.set_num_threads(1)
from tests.support.files.blends import build, gpt_config, tokens_of
from tests.builder.test_concurrent_builds import SIZES, config
for turn in range(first, first + rounds):
    gate = base / f"gate{turn}"
    gate.mkdir(exist_ok=True)
    (gate / str(os.getpid())).touch()
    deadline = time.monotonic() + 120
    while len(os.listdir(gate)) < crowd and time.monotonic() < deadline:
        time.sleep(0)
    print("built" if crowd > 1 else "begins", flush=True)
    train, valid, test = build(config(base, base / f"cache{turn}"), SIZES)
    print(hash(str(tokens_of(train, range(300)))) if crowd > 1 else "ends", flush=True)
"""


def config(base, cache):
    """A blend of six pairs in three splits."""
    return gpt_config(cache, blend=([f"{base}/pair{number}" for number in range(6)], [6, 5, 4, 3, 2, 1]), split="8,1,1")


def start(base, *, first=0, rounds=1, crowd=1):
    command = [sys.executable, "-W", "ignore", "-c", BUILDER, base, str(first), str(rounds), str(crowd), str(ROOT)]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def undisturbed(tmp_path):
    """What one process builds alone."""
    write_pairs(tmp_path, 6)
    build(config(tmp_path, tmp_path / "alone"), SIZES)
    return files_in(tmp_path / "alone")


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_eight_processes_that_build_the_same_cache_at_once_write_what_one_does(tmp_path, undisturbed, rounds):
    crowd = [start(tmp_path, rounds=rounds, crowd=8) for _ in range(8)]
    said = [process.communicate(timeout=280)[0] for process in crowd]
    assert [process.returncode for process in crowd] == [0] * 8
    assert len(set(said)) == 1
    assert len(said[0].splitlines()) == 2 * rounds
    for turn in range(rounds):
        assert files_in(tmp_path / f"cache{turn}") == undisturbed
        assert problems(tmp_path / f"cache{turn}") == []


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_builder_killed_at_any_moment_is_finished_by_the_next_as_if_nothing_had_been(tmp_path, undisturbed, kills):
    moments, seconds, half_way = random.Random(kills), 0.05, 0
    for turn in range(10 * kills):
        if turn >= kills and half_way >= kills // 4:
            break
        cache = tmp_path / f"cache{turn}"
        with start(tmp_path, first=turn) as process:
            assert process.stdout.readline() == "begins\n"
            time.sleep(moments.random() * seconds)
            process.send_signal(signal.SIGKILL)
            ended = process.stdout.read() == "ends\n"
        left = files_in(cache) if cache.exists() else {}
        half_way += 0 < len(left) < len(undisturbed)
        for problem in problems(cache) if left else []:
            assert "must have a living writer" in problem or "as its manifest says, found nothing" in problem
        begun = time.monotonic()
        datasets = build(config(tmp_path, cache), SIZES)
        seconds = 2 * (time.monotonic() - begun) if not ended else seconds / 2
        assert files_in(cache) == undisturbed
        assert problems(cache) == []
        assert [len(tokens_of(dataset, range(5))) for dataset in datasets] == [5] * 3
    assert half_way >= kills // 4, "hardly any of the kills came while files were being written"
