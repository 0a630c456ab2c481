"""The position of a loader in the checkpoints of accelerate."""

from pathlib import Path

import pytest
from accelerate import Accelerator

import trackbed
from tests.adapters.training import check_runs, expected, run
from trackbed.adapters.accelerate import register_loader
from trackbed.errors import ArgumentError

RANK = Path(__file__).parent / "accelerate_rank.py"


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_the_same_samples_on_other_ranks(folder, tmp_path):
    check_runs(
        lambda size, last, saved: run(RANK, size, folder, last, saved), expected(folder), tmp_path, is_compared=True
    )


def test_a_state_of_other_data_is_refused(folder, tmp_path):
    for name, is_refused in (("blend.toml", False), ("other.toml", True)):
        accelerator = Accelerator(cpu=True)
        loader = trackbed.BatchLoader(trackbed.open_blend(folder / name).train, batch_size=4)
        register_loader(accelerator, loader)
        if is_refused:
            with pytest.raises(ArgumentError, match="a run can resume only with"):
                accelerator.load_state(str(tmp_path))
        else:
            accelerator.save_state(str(tmp_path))


def test_what_is_no_loader_of_its_ranks_is_refused(folder):
    dataset = trackbed.open_blend(folder / "blend.toml").train
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ArgumentError, match="loader must be a BatchLoader, found a list"):
        register_loader(accelerator, [1])
    with pytest.raises(ArgumentError, match="accelerator must be an Accelerator, found a NoneType"):
        register_loader(None, trackbed.BatchLoader(dataset, batch_size=2))
    with pytest.raises(ArgumentError, match="create it after the Accelerator"):
        register_loader(accelerator, trackbed.BatchLoader(dataset, batch_size=2, rank=0, num_ranks=2))
