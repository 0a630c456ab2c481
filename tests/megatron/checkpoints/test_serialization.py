"""Save and load with the arguments of Megatron Core 0.16.1."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoints.few_entries import state, tensor, wanted
from trackbed.checkpoint import ShardedObject, load, open_checkpoint, save
from trackbed.checkpoint.ranks import meet
from trackbed.checkpoint.verify import find_damage
from trackbed.comm import run_ranks
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.serialization import remove_sharded_tensors
from trackbed.megatron.checkpoints.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from trackbed.megatron.checkpoints.strictness import StrictHandling


@pytest.fixture
def checkpoint(tmp_path):
    save(state("a", "b"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("handling", StrictHandling)
def test_keys_that_one_side_has_are_handled(handling, checkpoint, caplog):
    missing, unexpected = {"b", "o"} if handling.value.endswith("_all") else set(), {"c"}
    if handling is StrictHandling.ASSUME_OK_UNEXPECTED:
        with pytest.raises(CheckpointError, match="c: must be a tensor of the checkpoint"):
            serialization.load(wanted("a", "c"), checkpoint, strict=handling)
        return
    if handling.value.startswith("raise"):
        with pytest.raises(CheckpointError, match=r"Unexpected keys \(.*\): \{'c'\}"):
            serialization.load(wanted("a", "c"), checkpoint, strict=handling.value)
        return
    with caplog.at_level(logging.WARNING):
        found = serialization.load(wanted("a", "c"), checkpoint, strict=handling)
    if handling.value.startswith("return"):
        found, *keys = found
        assert keys == [missing, unexpected]
    assert set(found) == {"a"}
    assert ("Unexpected" in caplog.text) == handling.value.startswith("log")
    assert ("Missing" in caplog.text) == (handling is StrictHandling.LOG_ALL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_objects_are_described_under_megatrons_paths(tmp_path):
    dcp.save({"a": torch.arange(4.0), "epoch": 7}, checkpoint_id=str(tmp_path / "torchs"), no_dist=True)
    (tmp_path / "torchs" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, tmp_path / "torchs" / "common.pt")
    found = serialization.load(wanted("a"), tmp_path / "torchs", strict="return_all")
    assert found[1:] == ({"epoch"}, set())
    assert set(serialization.load_sharded_metadata(tmp_path / "torchs")) == {"a", "epoch"}


def test_a_strategy_saves_and_loads(tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    serialization.save(state("a"), path, TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=3))
    found = serialization.load(wanted("a"), path, TorchDistLoadShardedStrategy(), ("torch", 1))
    assert torch.equal(found["a"], torch.arange(4.0))


def test_the_description_of_the_contents_is_saved_without_a_process_group(tmp_path):
    serialization.save(state("a"), tmp_path / "step", content_metadata={"version": 2, "dp_cp_group": object()})
    assert serialization.load_content_metadata(tmp_path / "step") == {"version": 2}


def test_a_request_saves_when_it_is_executed(tmp_path):
    path = tmp_path / "checkpoint"
    request = serialization.save(state("a"), path, async_sharded_save=True)
    assert not path.exists()
    request.execute_sync()
    assert torch.equal(load(wanted("a"), path)["a"], torch.arange(4.0))


@pytest.mark.parametrize("strategy", [None, ("torch_dist", 1)])
def test_a_request_saves_to_the_folder_that_its_path_named_when_it_was_made(strategy, tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    request = serialization.save(state("a"), "checkpoint", strategy, async_sharded_save=True)
    monkeypatch.chdir(tmp_path / "there")
    request.execute_sync()
    assert list(open_checkpoint(tmp_path / "here" / "checkpoint")) == ["a"]
    assert list((tmp_path / "there").iterdir()) == []


def test_a_request_of_a_strategy_writes_to_the_folder_that_its_path_named_when_it_was_made(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    request = TorchDistSaveShardedStrategy().async_save(state("a"), ".")
    monkeypatch.chdir(tmp_path)
    request.execute_sync()
    assert (tmp_path / "here" / "__0_0.distcp").exists()


def test_a_request_that_fails_leaves_nothing_behind(tmp_path):
    request = serialization.save(state("a"), tmp_path / "checkpoint", ("torch_dist", 1), async_sharded_save=True)
    (folder,) = tmp_path.iterdir()
    (folder / "__0_0.distcp").mkdir()
    with pytest.raises(CheckpointError, match="rank 0: FileExistsError"):
        request.execute_sync()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [lambda shard: [shard, 1], lambda shard: (shard,)])
def test_a_shard_where_it_could_not_be_loaded_is_refused_by_strategies_too(tmp_path, place):
    with pytest.raises(CheckpointError, match="could not be loaded"):
        serialization.save({"layers": place(tensor("a", torch.ones(2)))}, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_a_cast_that_loses_values_is_made_by_strategies_with_a_warning(tmp_path, caplog):
    save(state("a"), tmp_path / "checkpoint")
    wanted = {"a": tensor("a", torch.zeros(4, dtype=torch.int8))}
    found = serialization.load(wanted, tmp_path / "checkpoint")
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert "a: loaded into another type" in caplog.text
    with pytest.raises(CheckpointError, match="allow_cast=True"):
        load(wanted, tmp_path / "checkpoint")


def test_differences_of_the_common_state_are_logged(tmp_path, caplog):
    def work(group):
        with meet("save", group):
            serialization.save(
                {"same": 1, "step": group.rank, "w": tensor("w", torch.ones(1), replica_id=group.rank)},
                tmp_path / "checkpoint",
                preprocess_common_before_consistancy_check=lambda common: common,
            )

    run_ranks(2, work)
    assert "Mismatched keys: [(('step',), <class 'int'>, <class 'int'>)]" in caplog.text


@pytest.mark.parametrize("way", ["save", "strategy"])
def test_tensors_are_removed_by_the_beginning_of_their_keys(way, tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="a") if way == "strategy" else None
    serialization.save(state("a.x", "a.y", "b"), path, strategy)
    (path / "notes.txt").write_text("kept")
    before = {file.name for file in path.iterdir()}
    remove_sharded_tensors(path, "a.")
    after = {file.name for file in path.iterdir()}
    assert {name for name in before - after if not name.startswith("a_")} == set()
    assert after <= before
    assert way == "save" or before - after == {name for name in before if name.startswith("a__")}
    assert list(open_checkpoint(path)) == ["b"]
    assert (path / "notes.txt").read_text() == "kept"
    assert list(find_damage(path)) == []
    assert load({**wanted("b"), "o": ShardedObject("o", None, (1,), (0,))}, path)["o"] == 5
    assert [found.name for found in tmp_path.iterdir()] == ["checkpoint"]
