"""Memory of two ranks, and the bytes that they move."""

import json
from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

SCRIPT = Path(__file__).with_name("memory_rank.py")
RANKS = 2
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {**OVERLAP, "use_distributed_optimizer": True, "overlap_param_gather": True}
FP32_GRADS = {"grad_reduce_in_fp32": True}
CASES = {
    "fp32": ("float32", OVERLAP, 16),
    "fp32, sharded": ("float32", SHARDED, 8 + 8 / RANKS),
    "bf16": ("bfloat16", {**OVERLAP, **FP32_GRADS}, 18),
    "bf16, sharded": ("bfloat16", {**SHARDED, **FP32_GRADS}, 6 + 12 / RANKS),
}


@pytest.fixture(scope="module")
def measured():
    """Figures of each case, of each rank."""
    cases = json.dumps([(dtype, options) for dtype, options, _ in CASES.values()])
    # Else the heap keeps what was freed.
    of_ranks = run_script(SCRIPT, RANKS, cases, limit_seconds=120, MALLOC_MMAP_THRESHOLD_="1000000")
    return dict(zip(CASES, zip(*of_ranks, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_memory_after_a_step_is_that_of_its_parts(measured, case):
    found = sum(rank["bytes per parameter"] for rank in measured[case]) / RANKS
    assert found == pytest.approx(CASES[case][2], rel=0.03)


@pytest.mark.parametrize("case", CASES)
def test_wrapping_needs_at_most_one_parameter_more_than_before_or_after(measured, case):
    for rank in measured[case]:
        assert rank["excess while wrapping"] <= rank["largest parameter"] + (1 << 20)  # a MiB for Python's objects


@pytest.mark.parametrize("case", CASES)
def test_bytes_moved_equal_the_formula(measured, case):
    share = (RANKS - 1) / RANKS
    for rank in measured[case]:
        if CASES[case][1] is OVERLAP or "use_distributed_optimizer" not in CASES[case][1]:
            wanted = [["all-reduce", 2 * share * size] for size in rank["buckets"]]
        else:
            wanted = [["reduce-scatter", share * size] for size in rank["buckets"]]
            wanted += [["all-gather", share * size] for size in rank["param buckets"][::-1]]
        assert rank["moved"] == wanted
