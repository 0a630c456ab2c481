"""Ctrl-C in the middle of a long build: it ends at once, and nothing half-written stays."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from types import SimpleNamespace
from trackbed.cache import Entry, Kind, Request
from trackbed.datasets.start import open_index
from trackbed.index import (
    EpochPlan, LegacyShuffle, balanced_blend, exhaustive_blend, greedy_blend, sample_index, shuffle_index,
)

N = 400_000_000
PLAN = EpochPlan(num_epochs=1, num_samples=N, samples_before_last=None)
weights = np.random.default_rng(1).random(1000)
blend = ("dataset_index", "dataset_sample_index")
builds = {
    "greedy": (blend, lambda a: greedy_blend(weights / weights.sum(), N, allocate=a)),
    "exhaustive": (blend, lambda a: exhaustive_blend([N // 1000] * 500 + [N // 1001] * 500, allocate=a)),
    "balanced": (blend, lambda a: balanced_blend([N // 1000] * 1000, seed=1, num_threads=2, allocate=a)),
    "shuffle": (("order",), lambda a: [shuffle_index(PLAN, LegacyShuffle(1), allocate=lambda s, d: a("order", s, d))]),
}
names, make = builds[sys.argv[2]]

def build(allocate):
    print("building", flush=True)
    return dict(zip(names, make(allocate)))

entry = Entry(directory=Path(sys.argv[1]), stem="x", description="x", arrays=names, decisions={"a": 1})
open_index(Request(entry, Kind(), SimpleNamespace(build=build, expected=dict)))
print("built", flush=True)
"""


@pytest.mark.parametrize("what", ["greedy", "exhaustive", "balanced", "shuffle"])
def test_ctrl_c_ends_a_long_build_and_leaves_nothing(tmp_path, what):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "building\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, errors = process.communicate(timeout=60)
        seconds = time.monotonic() - started
    assert "built" not in out
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert seconds < 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
