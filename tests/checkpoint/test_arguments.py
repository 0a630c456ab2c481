"""Arguments of Megatron Core 0.16.1 in Trackbed's own save and load."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from trackbed.checkpoint import ShardedObject, ShardedTensor, load, open_checkpoint, save
from trackbed.checkpoint.exchange import plan_parts
from trackbed.checkpoint.table import join_tables, tabulate
from trackbed.checkpoint.verify import find_damage
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.fully_parallel import choose_exchange
from trackbed.megatron.checkpoints.serialization import remove_sharded_tensors
from trackbed.megatron.checkpoints.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from trackbed.megatron.checkpoints.strictness import StrictHandling


def tensor(key, data, *cuts, **options):
    return ShardedTensor.from_rank_offsets(key, data, *cuts, **options)


def state(*keys):
    return {key: tensor(key, torch.arange(4.0)) for key in keys} | {"o": ShardedObject("o", 5, (1,), (0,))}


def wanted(*keys):
    return {key: tensor(key, torch.zeros(4)) for key in keys}


@pytest.fixture
def checkpoint(tmp_path):
    save(state("a", "b"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("handling", StrictHandling)
def test_keys_that_one_side_has_are_handled(handling, checkpoint, caplog):
    missing, unexpected = {"b", "o"} if handling.value.endswith("_all") else set(), {"c"}
    if handling is StrictHandling.ASSUME_OK_UNEXPECTED:
        with pytest.raises(CheckpointError, match="c: must be a tensor of the checkpoint"):
            load(wanted("a", "c"), checkpoint, strict=handling)
        return
    if handling.value.startswith("raise"):
        with pytest.raises(CheckpointError, match=r"Unexpected keys \(.*\): \{'c'\}"):
            load(wanted("a", "c"), checkpoint, strict=handling.value)
        return
    with caplog.at_level(logging.WARNING):
        found = load(wanted("a", "c"), checkpoint, strict=handling)
    if handling.value.startswith("return"):
        found, *keys = found
        assert keys == [missing, unexpected]
    assert set(found) == {"a"}
    assert ("Unexpected" in caplog.text) == handling.value.startswith("log")
    assert ("Missing" in caplog.text) == (handling is StrictHandling.LOG_ALL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("handling", StrictHandling)
def test_names_of_torchs_objects_are_keys(handling, tmp_path):
    dcp.save({"a": torch.arange(4.0), "epoch": 7}, checkpoint_id=str(tmp_path / "torchs"), no_dist=True)
    if handling is StrictHandling.RAISE_ALL:
        with pytest.raises(CheckpointError, match=r"Missing keys \(.*\): \{'epoch'\}"):
            load(wanted("a"), tmp_path / "torchs", strict=handling)
        return
    found = load(wanted("a"), tmp_path / "torchs", strict=handling)
    if handling.value.startswith("return"):
        found, *keys = found
        assert keys == [{"epoch"} if handling.value.endswith("_all") else set(), set()]
    assert torch.equal(found["a"], torch.arange(4.0))


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
    save(state("a"), path, TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=3))
    found = load(wanted("a"), path, TorchDistLoadShardedStrategy(), ("torch", 1))
    assert torch.equal(found["a"], torch.arange(4.0))
    with pytest.raises(ArgumentError, match="must be None where a strategy saves"):
        save(state("a"), path, ("torch_dist", 1), observe=print)
    with pytest.raises(ArgumentError, match="must be None where a strategy loads"):
        load(wanted("a"), path, ("torch_dist", 1), rename={"a": "b"})


@pytest.mark.parametrize("saves", [save, serialization.save])
@pytest.mark.parametrize("spelling", [".", "", "{}", "../{}"])
@pytest.mark.parametrize("content", ["nothing", "a note", "a checkpoint"])
def test_the_working_directory_is_no_place_for_a_checkpoint(content, spelling, saves, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    if content == "a note":
        (folder / "note").write_text("kept")
    elif content == "a checkpoint":
        save(state("a"), folder)
    before = sorted(folder.iterdir())
    monkeypatch.chdir(folder)
    place = spelling.format(folder if spelling == "{}" else "here")
    with pytest.raises(CheckpointError, match="must be another folder than the working directory"):
        saves(state("b"), place)
    assert (sorted(Path.cwd().iterdir()), list(tmp_path.iterdir())) == (before, [folder])
    saves(state("b"), "below")
    assert list(open_checkpoint(folder / "below")) == ["b"]


@pytest.mark.parametrize("saves", [save, serialization.save])
def test_a_link_to_a_folder_is_refused_before_anything_is_written(saves, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(CheckpointError, match=r"found a symbolic link: '.*/link'$"):
        saves(state("a"), tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    assert list((tmp_path / "real").iterdir()) == []


def test_a_request_saves_when_it_is_executed(tmp_path):
    path = tmp_path / "checkpoint"
    request = save(state("a"), path, async_sharded_save=True)
    assert not path.exists()
    request.execute_sync()
    assert torch.equal(load(wanted("a"), path)["a"], torch.arange(4.0))


def test_phases_are_observed_in_order(tmp_path):
    def work(group):
        found = []
        observe = lambda phase, seconds: found.append((phase, seconds))  # noqa: E731
        entry = tensor("a", torch.arange(4.0), replica_id=group.rank)
        save({"a": entry}, tmp_path / "checkpoint", group=group, observe=observe)
        load({"a": entry.without_data()}, tmp_path / "checkpoint", group=group, observe=observe)
        assert all(0 <= seconds < 60 for _, seconds in found)
        return [phase for phase, _ in found]

    assert run_ranks(2, work) == [["describe", "plan", "write", "collect", "commit", "open", "read", "merge"]] * 2


def test_a_phase_that_fails_is_not_observed(checkpoint):
    found = []
    with pytest.raises(CheckpointError, match="missing: must be a tensor of the checkpoint"):
        load(wanted("missing"), checkpoint, observe=lambda phase, _: found.append(phase))
    assert found == []


def test_what_an_observer_raises_is_raised_on_every_rank_and_the_folder_is_as_it_was(checkpoint):
    def observe(phase, _):
        if phase == "write":
            raise ValueError("no")

    def work(group):
        with pytest.raises(CheckpointError, match="save: rank 1: ValueError: no"):
            save(
                {"a": tensor("a", torch.zeros(4), replica_id=group.rank)},
                checkpoint,
                group=group,
                observe=observe if group.rank == 1 else None,
            )

    run_ranks(2, work)
    assert torch.equal(load(wanted("a"), checkpoint)["a"], torch.arange(4.0))


@pytest.mark.parametrize("strategy", [None, ("torch_dist", 1)])
def test_a_request_saves_to_the_folder_that_its_path_named_when_it_was_made(strategy, tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    request = save(state("a"), "checkpoint", strategy, async_sharded_save=True)
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
    request = save(state("a"), tmp_path / "checkpoint", ("torch_dist", 1), async_sharded_save=True)
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


def test_holes_are_saved_and_loaded_where_that_is_wanted(tmp_path):
    half = {"w": tensor("w", torch.ones(2), (0, 1, 2))}
    with pytest.raises(CheckpointError, match=r"w: main replicas must cover all elements, but no rank has \[0:2\]$"):
        save(half, tmp_path / "checkpoint")
    save(half, tmp_path / "checkpoint", validate_access_integrity=False)
    with pytest.raises(CheckpointError, match="load parts with validate_access_integrity=False"):
        load(half, tmp_path / "checkpoint")
    found = load(half, tmp_path / "checkpoint", validate_access_integrity=False)
    assert found["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="all 4 elements"):
        load({"w": tensor("w", torch.ones(4))}, tmp_path / "checkpoint")


def test_differences_of_the_common_state_are_logged(tmp_path, caplog):
    def work(group):
        save(
            {"same": 1, "step": group.rank, "w": tensor("w", torch.ones(1), replica_id=group.rank)},
            tmp_path / "checkpoint",
            preprocess_common_before_consistancy_check=lambda common: common,
            group=group,
        )

    run_ranks(2, work)
    assert "Mismatched keys: [(('step',), <class 'int'>, <class 'int'>)]" in caplog.text


@pytest.mark.parametrize("way", ["save", "strategy"])
def test_tensors_are_removed_by_the_beginning_of_their_keys(way, tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="a") if way == "strategy" else None
    save(state("a.x", "a.y", "b"), path, strategy)
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


def test_an_unknown_exchange_is_refused_by_name(checkpoint):
    with pytest.raises(ArgumentError, match="must be one of 'auto', 'none', 'flat', found 'best'"):
        load(wanted("a"), checkpoint, exchange="best")
    with pytest.raises(ArgumentError, match="must be one of 'auto', 'none', 'flat', found 'best'"):
        choose_exchange("best")


def test_parts_of_an_exchange_have_each_element_once_and_are_shared():
    def shards(rank):
        whole = (4, 3000, 2000)
        yield ShardedTensor("w", None, torch.float32, whole, whole, (0, 0, 0), None, rank)
        yield ShardedTensor("own", None, torch.float32, (2, 5), (1, 5), (rank, 0), None, 0)

    table = join_tables([tabulate(shards(rank), rank) for rank in range(2)])
    parts = plan_parts(table, 2)
    seen = torch.zeros(4, 3000, 2000, dtype=torch.uint8)
    loads = [0, 0]
    for part in parts:
        assert part.num_bytes <= 4 << 20
        assert sorted(table.rank[part.rows].tolist()) == [0, 1]
        loads[part.reader] += part.num_bytes
        seen[tuple(slice(low, low + size) for low, size in zip(part.first, part.shape, strict=True))] += 1
    assert seen.min() == seen.max() == 1
    assert abs(loads[0] - loads[1]) <= 4 << 20
