"""Data and checkpoints for Lightning."""

from pathlib import Path

import pytest
import torch

from tests.adapters.training import STEP, check_runs, expected, run
from trackbed.adapters.lightning import BlendDataModule, FolderCheckpointIO
from trackbed.checkpoint.damage import find_damage
from trackbed.errors import ArgumentError, CheckpointError

RANK = Path(__file__).parent / "lightning_rank.py"


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_the_same_samples_on_other_ranks(folder, tmp_path):
    check_runs(
        lambda size, last, saved: run(RANK, size, folder, last, saved), expected(folder), tmp_path, is_compared=True
    )
    assert not list(find_damage(tmp_path / "saved"))


def loader_of(folder, name):
    data = BlendDataModule(folder / name, batch_size=STEP)
    data.setup("fit")
    return data.train_dataloader()


def test_other_data_is_refused(folder):
    with pytest.raises(ArgumentError, match="a run can resume only with"):
        loader_of(folder, "other.toml").load_state_dict(loader_of(folder, "blend.toml").state_dict())


class Unknown:
    pass


def test_a_checkpoint_is_a_folder_that_comes_back_and_can_be_removed(place):
    checkpoints = FolderCheckpointIO()
    state = {"state_dict": {"a.weight": torch.ones(3)}, "optimizer_states": [{"state": {0: {"step": 2}}}], "epoch": 1}
    path = f"{place}/runs/last.ckpt"
    checkpoints.save_checkpoint(state, path)
    assert str(checkpoints.load_checkpoint(path)) == str(state)
    with pytest.raises(CheckpointError, match="Unknown"):
        checkpoints.save_checkpoint({**state, "loops": Unknown()}, path)
    assert checkpoints.load_checkpoint(path)["epoch"] == 1
    checkpoints.remove_checkpoint(path)
    with pytest.raises(CheckpointError):
        checkpoints.load_checkpoint(path)
    with pytest.raises(CheckpointError):
        checkpoints.remove_checkpoint(f"{place}/runs")
    with pytest.raises(ArgumentError, match="storage_options: must be None"):
        checkpoints.save_checkpoint(state, path, {"a": 1})
