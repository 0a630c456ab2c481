"""Batches and checkpoints for torchtitan."""

import warnings
from pathlib import Path

import pytest
import torch

import trackbed
from tests.adapters.training import (
    SEQUENCE,
    STEP,
    Model,
    both_tiers,
    check_runs,
    check_steps,
    digests,
    expected,
    losses_of,
    run,
)
from trackbed.errors import ArgumentError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trackbed.adapters.torchtitan import BlendDataLoader, FolderCheckpointManager

RANK = Path(__file__).parent / "torchtitan_rank.py"


@pytest.mark.slow
@pytest.mark.dist
@both_tiers
def test_a_run_goes_on_with_the_same_samples_on_other_ranks(is_compared, folder, tmp_path):
    check_runs(lambda size, last, saved: run(RANK, size, folder, last, saved), expected(folder), tmp_path, is_compared)
    steps = sorted(path.name for path in (tmp_path / "saved" / "checkpoint").glob("step-*"))
    assert steps == ["step-16", "step-20"]


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_torchtitans_own_manager(folder, tmp_path):
    wanted = expected(folder)
    whole = run(RANK, 2, folder, 12, tmp_path / "whole", "torchtitan")
    check_steps(run(RANK, 2, folder, 8, tmp_path / "saved", "torchtitan"), wanted, losses_of(whole), last=8)
    check_steps(run(RANK, 2, folder, 12, tmp_path / "saved"), wanted, losses_of(whole), first=8, last=12)


def loader_of(folder, blend="blend.toml", split="train", **sizes):
    """A loader of one rank, for release 0.3.0 unless other sizes are given."""
    sizes = sizes or {"seq_len": SEQUENCE, "local_batch_size": STEP}
    config = BlendDataLoader.Config(blend=str(folder / blend), split=split)
    return config.build(dp_world_size=1, dp_rank=0, tokenizer=None, snapshot_every_n_steps=None, **sizes)


def test_batches_of_the_main_branch_are_flat(folder):
    wanted = expected(folder)
    loader = loader_of(folder, max_context_length=2 * SEQUENCE, num_tokens_per_batch=STEP * SEQUENCE)
    for step, (inputs, labels) in zip(wanted, loader, strict=False):
        assert labels.shape == (STEP * SEQUENCE,)
        assert inputs["positions"].tolist() == [*range(SEQUENCE)] * STEP
        assert digests(inputs["input"].view(STEP, SEQUENCE), labels.view(STEP, SEQUENCE)) == step
    loader.close()


def test_a_loop_over_the_validation_split_begins_anew(folder):
    loader = loader_of(folder, split="valid")
    first, again = (next(iter(loader))[0]["input"] for _ in range(2))
    assert torch.equal(first, again)


def test_samples_of_another_length_and_other_data_are_refused(folder):
    with pytest.raises(ArgumentError, match=r"sequence_length must be training\.seq_len 32, found 64"):
        loader_of(folder, seq_len=32, local_batch_size=1)
    for sizes in ((32, 128), (64, 100)):
        with pytest.raises(ArgumentError, match="sequence_length must be at most max_context_length"):
            loader_of(folder, max_context_length=sizes[0], num_tokens_per_batch=sizes[1])
    with pytest.raises(ArgumentError, match=r"dataloader\.blend must be the path"):
        BlendDataLoader.Config().build(dp_world_size=1, dp_rank=0, seq_len=1, local_batch_size=1)
    with pytest.raises(ArgumentError, match="the blend must have a split 'test'"):
        loader_of(folder, split="test")
    with pytest.raises(ArgumentError, match="a run can resume only with"):
        loader_of(folder, "other.toml").load_state_dict(loader_of(folder).state_dict())


class Steps:
    """A number, as a state of torchtitan's trainer."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"step": self.number}

    def load_state_dict(self, state):
        self.number = state["step"]


def manager_of(base, model, steps, **fields):
    """A checkpoint manager of one rank."""
    optimizer = torch.optim.AdamW(model.parameters())
    fields = {"enable": True, "folder": "checkpoint", "interval": 5, **fields}
    return FolderCheckpointManager.Config(**fields).build(
        dataloader=None,
        model_parts=[model],
        optimizers=Steps(0),
        lr_schedulers=Steps(optimizer.param_groups[0]["lr"]),
        states={"train_state": steps},
        base_folder=str(base),
    )


def saved_run(folder, last=10, **fields):
    """Saves steps of a run with one model. Returns its first weight."""
    torch.manual_seed(1)
    model, steps = Model(), Steps(0)
    manager = manager_of(folder, model, steps, **fields)
    saved = []
    for step in range(1, last + 1):
        steps.number = step
        saved += [step] * manager.save(step, last_step=step == last)
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    manager.close()
    return saved, model.head.weight


def test_fields_for_saving_are_honoured(tmp_path):
    saved, weight = saved_run(tmp_path, 12, enable_first_step_checkpoint=True, keep_latest_k=2, export_dtype="bfloat16")
    assert saved == [1, 5, 10, 12]
    folder = tmp_path / "checkpoint"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-10", "step-12"]
    last = trackbed.open_checkpoint(folder / "step-12")
    assert sorted(last) == ["embedding.weight", "head.bias", "head.weight"]
    assert torch.equal(last["head.weight"][:], weight.to(torch.bfloat16))
    assert not manager_of(tmp_path, Model(), Steps(0), enable=False).save(5)
    assert not manager_of(tmp_path, Model(), Steps(0), load_only=True).save(5)


def test_fields_for_loading_are_honoured(tmp_path):
    _, weight = saved_run(tmp_path, last_save_model_only=False)
    for fields in ({}, {"load_only": True}):
        model, steps = Model(), Steps(0)
        manager = manager_of(tmp_path, model, steps, **fields)
        assert manager.load()
        assert (steps.number, torch.equal(model.head.weight, weight)) == (10, True)
        assert manager.load(5)
        assert steps.number == 5
        manager.close()
    model, steps = Model(), Steps(0)
    manager = manager_of(tmp_path, model, steps, load_only=True, exclude_from_loading=["train_state"])
    assert manager.load()
    assert (steps.number, torch.equal(model.head.weight, weight)) == (0, True)
    path = str(tmp_path / "checkpoint" / "step-10")
    for is_model_only, number in ((True, 0), (False, 10)):
        model, steps = Model(), Steps(0)
        fields = {"initial_load_path": path, "initial_load_model_only": is_model_only}
        manager = manager_of(tmp_path / "other", model, steps, **fields)
        assert manager.load()
        assert (steps.number, torch.equal(model.head.weight, weight)) == (number, True)
        manager.close()
    manager = manager_of(tmp_path / "none", Model(), Steps(0))
    assert not manager.load()
    manager.close()


def test_what_is_not_honoured_is_refused_by_name(tmp_path):
    for name in ("last_save_in_hf", "initial_load_in_hf"):
        with pytest.raises(ArgumentError, match=f"checkpoint.{name} must be False, found True"):
            manager_of(tmp_path, Model(), Steps(0), **{name: True})
    with pytest.raises(ArgumentError, match=r"checkpoint\.exclude_from_loading must name train_state, optimizer"):
        manager_of(tmp_path, Model(), Steps(0), exclude_from_loading=["other"])


def test_an_absolute_folder_and_an_address_are_not_below_the_dump_folder(place, tmp_path):
    folder = place.text("elsewhere")
    manager = manager_of(tmp_path / "dump", Model(), Steps(0), folder=folder)
    assert manager.folder == folder
    manager.close()
    assert not (tmp_path / "dump").exists()
