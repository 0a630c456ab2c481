"""Modules and optimizers in a state, and tensors without memory."""

import pytest
import torch
from torch import nn

import trackbed
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError

CONFIG = {"use_distributed_optimizer": True, "bucket_size": 20}


def trained(group, **config):
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    wrapper = trackbed.DistributedDataParallel(
        module, trackbed.DistributedDataParallelConfig(**config), process_group=group
    )
    adamw = torch.optim.AdamW(module.parameters(), lr=0.01)
    optimizer = trackbed.DataParallelOptimizer(adamw, wrapper)
    optimizer.zero_grad()
    wrapper(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return wrapper, adamw, optimizer


def test_torchs_optimizer_of_a_sharded_one_is_refused(tmp_path):
    def run(group):
        wrapper, adamw, _ = trained(group, **CONFIG)
        with pytest.raises(CheckpointError, match="optimizer, of AdamW: its state is that of this rank's parts"):
            trackbed.save({"model": wrapper, "optimizer": adamw}, tmp_path / "saved", group=group)

    run_ranks(2, run)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", [CONFIG, {}])
def test_a_wrapper_and_its_optimizer_give_and_get_their_states(config, tmp_path):
    def run(group):
        torch.manual_seed(1)
        wrapper, _, optimizer = trained(group, **config)
        trackbed.save({"model": wrapper, "optimizer": optimizer}, tmp_path / "saved", group=group)
        torch.manual_seed(2)
        other, _, theirs = trained(group, **config)
        loaded = trackbed.load({"model": other, "optimizer": theirs}, tmp_path / "saved", group=group)
        assert loaded["optimizer"] is theirs
        for name, value in wrapper.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)
        states, found = optimizer.full_state_dict()["state"], theirs.full_state_dict()["state"]
        assert all(torch.equal(found[name][key], value) for name in states for key, value in states[name].items())

    run_ranks(2, run)


def test_an_optimizer_that_has_not_stepped_says_what_to_do(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    trackbed.save({"model": model.state_dict(), "optimizer": {"state": {}}}, tmp_path / "saved", group=SOLO)
    with pytest.raises(
        CheckpointError, match=r"optimizer, of AdamW: .*failed, KeyError.* load_sharded_state need none"
    ):
        trackbed.load({"optimizer": optimizer}, tmp_path / "saved", group=SOLO)


def test_tensors_without_memory_are_refused_by_key(tmp_path):
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"model\.weight: must have values to be saved, but lies on the meta dev"):
        trackbed.save({"model": meta.state_dict()}, tmp_path / "saved", group=SOLO)
    assert not list(tmp_path.iterdir())


def test_a_plain_tensor_that_is_not_stored_is_told(tmp_path, caplog):
    trackbed.save({"model": {"weight": torch.ones(2)}}, tmp_path / "saved", group=SOLO)
    state = {"model": {"wieght": torch.zeros(2), "weight": torch.zeros(2)}}
    with pytest.raises(
        CheckpointError, match=r"model\.wieght: must be a tensor or a plain value of the checkpoint, but"
    ):
        trackbed.load(state, tmp_path / "saved", group=SOLO)
    loaded = trackbed.load(state, tmp_path / "saved", strict="log", group=SOLO)
    assert loaded["model"].keys() == {"weight"}
    assert "model.wieght" in caplog.text
    assert trackbed.checkpoint.differing_keys(state, tmp_path / "saved", group=SOLO).not_stored == {"model.wieght"}
