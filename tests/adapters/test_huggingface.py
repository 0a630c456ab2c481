"""Data for the Trainer of transformers."""

from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import trackbed
from tests.adapters.training import SEQUENCE, STEP, STEPS, check_runs, digests, masked, run
from trackbed.adapters.huggingface import OPTIONS, TrainerDataset, TrainerPosition
from trackbed.errors import ArgumentError

RANK = Path(__file__).parent / "huggingface_rank.py"


def samples_of(batch):
    """Tokens and labels of a batch of `BatchLoader`, as models take them that shift labels themselves."""
    labels = masked(batch["labels"], batch["loss_mask"])
    return digests(batch["tokens"], torch.cat([batch["tokens"][:, :1], labels[:, :-1]], 1))


def expected(folder):
    dataset = trackbed.open_blend(folder / "blend.toml").train
    loader = trackbed.BatchLoader(dataset, batch_size=STEP, rank=0, num_ranks=1)
    return [samples_of(batch) for _, batch in zip(range(STEPS), loader, strict=False)]


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_the_same_samples_on_other_ranks(folder, tmp_path):
    check_runs(lambda size, last, saved: run(RANK, size, folder, last, saved), expected(folder), tmp_path, True)


class Recorded(Trainer):
    """Notes the samples of each micro-batch."""

    noted = ()

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.noted = [*self.noted, digests(inputs["input_ids"], inputs["labels"])]
        return super().training_step(model, inputs, num_items_in_batch)


def trained(data, out, max_steps, batch_size, *, resume=False, position=None, **options):
    """Trains a model. Returns the samples of all micro-batches, and the position of the callback."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=SEQUENCE, n_embd=8, n_layer=1, n_head=1))
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "steps", "save_steps": max_steps}
    arguments = TrainingArguments(
        str(out), max_steps=max_steps, per_device_train_batch_size=batch_size, **{**OPTIONS, **quiet, **options}
    )
    position = position or TrainerPosition(data)
    trainer = Recorded(model, arguments, train_dataset=data, callbacks=[position])
    trainer.train(resume_from_checkpoint=resume)
    state = position.state()["attributes"]["position"] if isinstance(position, TrainerPosition) else None
    return [name for batch in trainer.noted for name in batch], state


def data_of(folder, blend="blend.toml"):
    return TrainerDataset(trackbed.open_blend(folder / blend).train)


def in_order(data, count):
    """The first samples of all passes."""
    data.first.zero_()
    samples = [data[index] for index in range(count)]
    return [digests(one["input_ids"][None], one["labels"][None])[0] for one in samples]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_passes_follow_each_other_where_a_run_resumes_with_another_batch_size(folder, tmp_path):
    data = data_of(folder)
    assert len(data) < 500
    first, position = trained(data, tmp_path, 11, 8, gradient_accumulation_steps=3)
    assert position["passes"] == 0
    assert position["consumed_samples"] == len(first) == 11 * 24
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    second, position = trained(data, tmp_path, 40, 16, resume=True, **workers)
    assert position["passes"] * len(data) + position["consumed_samples"] == len(first + second) == 264 + 29 * 16
    assert first + second == in_order(data, len(first + second))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_other_data_and_a_checkpoint_without_a_position_are_refused(folder, tmp_path):
    trained(data_of(folder), tmp_path, 1, 2)
    with pytest.raises(ArgumentError, match="a run can resume only with"):
        trained(data_of(folder, "other.toml"), tmp_path, 2, 2, resume=True)
    path = tmp_path / "checkpoint-1" / "trainer_state.json"
    path.write_text(path.read_text().replace("TrainerPosition", "OtherCallback"))
    with pytest.raises(ArgumentError, match="must have the state of a TrainerPosition, found none"):
        trained(data_of(folder), tmp_path, 2, 2, resume=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"passes": 0', '"passes": -1', "passes must be"),
        ('"passes": 0', '"passes": 1.5', "passes must be"),
        ('"passes": 0', '"other": 0', "whole state of one TrainerPosition"),
        ('"position"', '"other"', "whole state of one TrainerPosition"),
    ],
)
def test_a_damaged_position_is_refused(old, new, reason, folder, tmp_path):
    trained(data_of(folder), tmp_path, 1, 2)
    path = tmp_path / "checkpoint-1" / "trainer_state.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ArgumentError, match=reason):
        trained(data_of(folder), tmp_path, 2, 2, resume=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_position_of_another_dataset_and_batches_of_rank_0_are_refused(folder, tmp_path):
    with pytest.raises(ArgumentError, match="data must be the train_dataset of the Trainer"):
        trained(data_of(folder), tmp_path, 1, 2, position=TrainerPosition(data_of(folder)))
    with pytest.raises(ArgumentError, match="dispatch_batches=False"):
        trained(data_of(folder), tmp_path, 1, 2, accelerator_config={"dispatch_batches": True})


def test_a_dataset_ends_behind_its_last_sample(folder):
    data = data_of(folder)
    assert len(list(data)) == len(data)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_without_the_callback_a_run_goes_on_behind_what_it_was_trained_on_too(folder, tmp_path):
    data = data_of(folder)
    first, _ = trained(data, tmp_path, 3, 4)
    second, _ = trained(data, tmp_path, 6, 4, resume=True, position=TrainerCallback())
    assert first + second == in_order(data, 24)


@pytest.mark.parametrize(("name", "value"), [("ignore_data_skip", False), ("train_sampling_strategy", "random")])
def test_arguments_with_which_samples_would_be_skipped_or_shuffled_are_refused(name, value, folder, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **{**OPTIONS, name: value})
    with pytest.raises(ArgumentError, match=f"TrainingArguments: {name} must be"):
        TrainerPosition(data_of(folder)).on_train_begin(arguments, TrainerState(), TrainerControl())


def test_what_is_no_dataset_is_refused():
    with pytest.raises(ArgumentError, match="dataset must be that of a split"):
        TrainerDataset([1])
    with pytest.raises(ArgumentError, match="leave restore_callback_states_from_checkpoint out"):
        TrainerPosition()
    with pytest.raises(ArgumentError, match=r"data must be the TrainerDataset of training, found 1$"):
        TrainerPosition(1)
