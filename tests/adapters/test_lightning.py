"""Data and checkpoints for Lightning."""

from itertools import islice
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


def module_of(folder, name="blend.toml", state=None):
    data = BlendDataModule(folder / name, batch_size=STEP)
    if state is not None:
        data.load_state_dict(state)  # before `setup`, as Lightning does
    data.setup("fit")
    return data


def tokens_of(batches, count=None):
    return [batch["tokens"].tolist() for batch in islice(batches, count)]


def test_other_data_is_refused(folder):
    data = module_of(folder)
    data.train_dataloader()
    with pytest.raises(ArgumentError, match="a run can resume only with"):
        module_of(folder, "other.toml", data.state_dict()).train_dataloader()


@pytest.mark.parametrize("count", [5, None])
def test_the_position_is_kept_between_epochs_and_by_loaders_that_are_made_again(folder, count):
    data = module_of(folder)
    loader = data.train_dataloader()
    whole = tokens_of(loader)
    first = tokens_of(loader, count)
    assert first == whole[:count]
    wanted = whole[count:] if count else whole
    for other in (module_of(folder, state=data.state_dict()), data):
        assert tokens_of(other.train_dataloader()) == wanted


def test_each_validation_is_of_the_same_samples(folder):
    data = module_of(folder)
    (loader,) = data.val_dataloader()
    assert tokens_of(loader, 1) == tokens_of(loader, 1) == tokens_of(loader)[:1]


def test_a_blend_without_validation_has_no_loaders_of_it(folder, tmp_path):
    text = (folder / "blend.toml").read_text().replace('split = "90,10"', 'split = "1"').replace(", valid = 20", "")
    (tmp_path / "alone.toml").write_text(text.replace('path = "', f'path = "{folder}/'))
    assert module_of(tmp_path, "alone.toml").val_dataloader() == []


class Unknown:
    pass


def test_a_checkpoint_is_a_folder_that_comes_back_and_can_be_removed(place):
    checkpoints = FolderCheckpointIO()
    state = {"state_dict": {"a.weight": torch.ones(3)}, "optimizer_states": [{"state": {0: {"step": 2}}}], "epoch": 1}
    path = place.text("runs/last.ckpt")
    checkpoints.save_checkpoint(state, path)
    assert str(checkpoints.load_checkpoint(path)) == str(state)
    with pytest.raises(CheckpointError, match="Unknown"):
        checkpoints.save_checkpoint({**state, "loops": Unknown()}, path)
    assert checkpoints.load_checkpoint(path)["epoch"] == 1
    checkpoints.remove_checkpoint(path)
    checkpoints.remove_checkpoint(path)  # another run has removed it
    with pytest.raises(CheckpointError):
        checkpoints.load_checkpoint(path)
    with pytest.raises(CheckpointError):
        checkpoints.remove_checkpoint(place.text("runs"))
    with pytest.raises(ArgumentError, match="storage_options: must be None"):
        checkpoints.save_checkpoint(state, path, {"a": 1})
