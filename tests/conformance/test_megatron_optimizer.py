"""Megatron Core's distributed optimizer on Trackbed's buffers, against the same optimizer on its own buffers."""

import json
from pathlib import Path

import pytest

from tests.conformance.train_megatron import CASES, CLIP, STEPS
from tests.support.megatron_core.release import needs_the_wrappers_layouts
from tests.support.processes.launching import run_script

pytestmark = needs_the_wrappers_layouts

HERE = Path(__file__).parent
LIMIT_SECONDS = 300
RANKS = 2


def records(folder, *options):
    """Records of a training on several ranks, by rank."""
    script, shim = HERE / "train_megatron.py", str(HERE / "megatron_lm")
    run_script(script, RANKS, folder, *options, limit_seconds=LIMIT_SECONDS, PYTHONPATH=shim)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return records(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return records(tmp_path_factory.mktemp("installed"), "--install")


@pytest.mark.parametrize("case", CASES)
def test_the_training_is_one_that_shows_differences(stock, case):
    steps, others = (rank[case] for rank in stock)
    norms = [float.fromhex(step["norm"]) for step in steps[:-1]]
    assert all(norm > CLIP for norm in norms)
    assert len({step["parameters"] for step in steps}) == STEPS + 1
    assert [step["parameters"] for step in steps] == [step["parameters"] for step in others]
    assert len({step["main_gradients"] for step in [*steps[:-1], *others[:-1]]}) == 2 * STEPS
    many = CASES[case].get("overlap_grad_reduce") and "bucket_size" not in CASES[case]
    assert steps[0]["buckets"] == (6 if many else 2)


@pytest.mark.parametrize("case", CASES)
def test_megatron_trains_to_the_same_bits_on_trackbed(stock, installed, case):
    assert (stock[0]["buffers"], installed[0]["buffers"]) == ("megatron", "trackbed")
    assert installed[0][case] == stock[0][case]
    assert installed[1][case] == stock[1][case]
