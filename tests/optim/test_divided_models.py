"""Models that FSDP2 divides, and torch's optimizers: saved by some ranks, loaded by others and by torch."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "divided_rank.py"


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(2,), pytest.param((4, 2, 1, 3), marks=pytest.mark.slow)])
def test_a_divided_model_and_its_optimizer_are_loaded_in_any_layout(sizes, tmp_path):
    for size in sizes:
        found = run_script(RANK, size, tmp_path, 3 if len(sizes) == 1 else 20, limit_seconds=240)
        assert len(found) == size
