"""States of optimizers between Megatron Core and Trackbed, by Megatron Core's own optimizer and its checkpoints."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.models.placed import saved, whole_tensors
from tests.support.processes.launching import ROOT, run_script

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks have found, and states before and after they were read into tensor-parallel shards."""
    folder = tmp_path_factory.mktemp("states")
    wanted = whole_tensors(saved(folder / "parts", 1, 1, 2), 1)
    shim = os.pathsep.join([str(HERE / "megatron_lm"), str(ROOT)])
    ranks = run_script(HERE / "optimizer_states_rank.py", 2, folder, limit_seconds=200, PYTHONPATH=shim)
    places = {(rank, 2, 0, 1): {"state": torch.load(folder / f"{rank}.pt")} for rank in range(2)}
    return [lines[-1] for lines in ranks], wanted, whole_tensors(places, 2)


@pytest.mark.dist
def test_a_state_of_megatron_whose_buckets_need_no_padding_goes_on_here(found):
    for rank in found[0]:
        outcome = rank["large buckets"]
        assert outcome == {"buckets": 2, "differs": [], "rates": [0.01, 0.01], "steps": [3.0], "model": True}


@pytest.mark.dist
def test_shifted_states_of_several_buckets_are_refused_before_anything_changes(found):
    for rank in found[0]:
        assert "must be those of the model, but those of" in rank["buckets"]["error"]
        assert "megatron-core up to 0.19.0 writes tensors that are shifted" in rank["buckets"]["error"]
        assert rank["buckets"]["is_unchanged"]


@pytest.mark.dist
def test_the_optimizer_of_megatron_goes_on_from_a_state_of_ours(found):
    for rank in found[0]:
        assert rank["to megatron"] == {"differs": [], "model": True}


@pytest.mark.dist
def test_megatron_reads_states_into_tensor_parallel_and_stacked_shards(found):
    _, wanted, read = found
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[key], value) for key, value in wanted.items())
