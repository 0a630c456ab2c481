"""Ranks that are in different saves, and states that could be saved and not loaded again."""

import json
import os

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from trackbed.checkpoint import ShardedObject, ShardedTensor, load, open_checkpoint, save
from trackbed.checkpoint.damage import find_damage
from trackbed.comm import run_ranks
from trackbed.errors import CheckpointError


def tensor(key, data):
    return ShardedTensor.from_rank_offsets(key, data)


def half(group, value):
    """A tensor of which each of two ranks has a half."""
    data = torch.full((4,), float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", data, (0, group.rank, group.size)), "step": value}


def test_ranks_that_save_different_steps_are_refused(tmp_path):
    def work(group):
        for step in (1, 2):
            save(half(group, step), tmp_path / f"step-{step}", group=group)
        own = 3 + group.rank  # rank 1 has left one out
        words = r"folder: must be the same on all ranks, but rank 1 saves to .*step-4, and rank 0 to "
        with pytest.raises(CheckpointError, match=words):
            save(half(group, own), tmp_path / f"step-{own}", group=group)
        save(half(group, 5), tmp_path / "step-5", group=group)

    run_ranks(2, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-5"]
    assert list(find_damage(tmp_path / "step-5")) == []


def test_a_save_and_a_load_are_not_taken_for_one(tmp_path):
    def work(group, loads):
        save(half(group, 1), tmp_path / f"old-{loads}", group=group)
        call, name = (load, "old") if group.rank == loads else (save, "new")
        with pytest.raises(CheckpointError, match=r"rank \d"):
            call(half(group, 2), tmp_path / f"{name}-{loads}", group=group)

    for loads in (0, 1):
        run_ranks(2, lambda group, loads=loads: work(group, loads))
        assert not (tmp_path / f"new-{loads}").exists()


def check_refused(folder, state, words):
    """An earlier checkpoint stays whole where a state is refused."""
    save({"w": tensor("w", torch.ones(3)), "n": 1}, folder)
    with pytest.raises(CheckpointError, match=words):
        save(state, folder)
    assert list(find_damage(folder)) == []
    assert load({"w": tensor("w", torch.zeros(3))}, folder)["n"] == 1


def test_a_tensor_with_the_unique_key_of_an_object_is_refused(tmp_path):
    state = {"t": tensor("k/shard_0_1", torch.ones(2)), "o": ShardedObject("k", 1, (1,), (0,))}
    check_refused(tmp_path / "saved", state, r"k/shard_0_1: must be the key of a tensor or the unique key of an object")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantized_tensors_are_refused_by_name(tmp_path, dtype):
    data = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, dtype)
    words = rf"q: must be of a type whose elements are their values, but is of {dtype}"
    check_refused(tmp_path / "saved", {"q": tensor("q", data)}, words)


@pytest.mark.parametrize("data", [torch.ones(3, device="meta"), torch.eye(3).to_sparse()])
def test_tensors_without_plain_values_are_refused_by_name_in_both_directions(tmp_path, data):
    check_refused(tmp_path / "saved", {"x": tensor("x", data)}, "x: must be a dense tensor with values, but is torch")
    save({"x": tensor("x", torch.ones(data.shape))}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="x: must be a dense tensor with values"):
        load({"x": tensor("x", data)}, tmp_path / "other")


def test_targets_that_are_conjugate_or_negative_views_get_their_values(tmp_path):
    stored = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    save({"z": tensor("z", stored), "y": tensor("y", stored.imag.clone())}, tmp_path / "saved")
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    negative = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    found = load({"z": tensor("z", conjugate), "y": tensor("y", negative)}, tmp_path / "saved")
    assert torch.equal(found["z"].resolve_conj(), stored)
    assert torch.equal(found["y"].resolve_neg(), stored.imag)
    part = torch.zeros(1, dtype=torch.complex64).conj()
    cut = ShardedTensor.from_rank_offsets("z", part, (0, 1, 2))
    load({"z": cut}, tmp_path / "saved", allow_parts=True)
    assert part.item() == 3 - 4j


@pytest.mark.parametrize(
    "cut",
    [
        lambda: torch.arange(12.0)[::2][:1],
        lambda: torch.arange(12.0).view(3, 4).t()[2:3, 1:2],
        lambda: torch.view_as_real(torch.ones(1, dtype=torch.complex64))[..., 1],
        lambda: torch.arange(12.0)[5:][::3][1:2],
    ],
)
def test_one_element_may_have_any_stride(tmp_path, cut):
    save({"x": tensor("x", cut())}, tmp_path / "saved")
    target = cut()
    wanted = target.clone()
    target.zero_()
    load({"x": tensor("x", target)}, tmp_path / "saved")
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("size", [1, 2])
def test_a_state_may_have_tensors_without_axes_alone(tmp_path, size):
    def work(group):
        replica = group.rank
        state = {"x": ShardedTensor.from_rank_offsets("x", torch.tensor(2.5), replica_id=replica)}
        save(state, tmp_path / "saved", group=group)
        target = torch.tensor(0.0)
        load({"x": ShardedTensor.from_rank_offsets("x", target, replica_id=replica)}, tmp_path / "saved", group=group)
        assert target == 2.5

    run_ranks(size, work)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("value", [[5], [[9]], ["a"], {"b": [1]}])
def test_lists_of_one_element_of_torchs_own_checkpoints_stay_lists(tmp_path, value):
    dcp.save({"o": value, "t": torch.ones(2)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    opened = open_checkpoint(tmp_path / "saved")
    assert [opened.load_object(key) for key in opened.object_keys] == [
        value.get("b") if isinstance(value, dict) else value
    ]


def test_a_list_of_one_element_in_an_object_stays_a_list(tmp_path):
    state = {"o": ShardedObject("o", [7], (1,), (0,)), "p": ShardedObject("p", [8], (), ())}
    save(state, tmp_path / "saved")
    found = load({"o": ShardedObject("o", None, (1,), (0,)), "p": ShardedObject("p", None, (), ())}, tmp_path / "saved")
    assert found["o"] == [7]
    assert found["p"] == [8]


def test_a_folder_with_a_metadata_json_of_another_program_is_refused(tmp_path):
    (tmp_path / "metadata.json").write_text(json.dumps({"dataset": 1}))
    (tmp_path / "notes.distcp").write_text("mine")
    with pytest.raises(CheckpointError, match=r"metadata\.json there must be of a checkpoint"):
        save({"w": tensor("w", torch.ones(3))}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["metadata.json", "notes.distcp"]  # noqa: PTH208
    (tmp_path / "metadata.json").unlink()
    (tmp_path / "metadata.json").mkdir()
    with pytest.raises(CheckpointError, match=r"metadata\.json there must be of a checkpoint"):
        save({"w": tensor("w", torch.ones(3))}, tmp_path)


def test_files_of_the_program_that_end_like_data_files_are_kept(tmp_path):
    save({"w": tensor("w", torch.ones(3))}, tmp_path / "saved")
    (tmp_path / "saved" / "report.distcp").write_text("mine")
    save({"w": tensor("w", torch.zeros(3))}, tmp_path / "saved")
    assert (tmp_path / "saved" / "report.distcp").read_text() == "mine"


def test_nothing_is_moved_to_a_folder_with_a_folder_of_the_name_of_a_file(tmp_path):
    (tmp_path / "saved" / "common.pt").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"common\.pt: must be no folder"):
        save({"w": tensor("w", torch.ones(3))}, tmp_path / "saved")
    assert os.listdir(tmp_path / "saved") == ["common.pt"]  # noqa: PTH208
    assert os.listdir(tmp_path) == ["saved"]  # noqa: PTH208


def test_an_index_may_be_a_number_of_numpy(tmp_path):
    save({"w": tensor("w", torch.arange(3.0))}, tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved")["w"][np.int64(2)] == 2.0


def test_a_value_that_cannot_be_pickled_is_named_by_its_place(tmp_path):
    with pytest.raises(CheckpointError, match=r"common\.pt: a\.b\.1 must be a value that can be pickled, but"):
        save({"w": tensor("w", torch.ones(2)), "a": {"b": [1, lambda: 0]}}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"o/shard_0_1: must be a value that can be pickled, but"):
        save({"o": ShardedObject("o", lambda: 0, (1,), (0,))}, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
