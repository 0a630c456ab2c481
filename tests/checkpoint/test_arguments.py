"""Arguments of save and load."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoints.few_entries import state, tensor, wanted
from trackbed.checkpoint import ShardedTensor, differing_keys, load, open_checkpoint, save
from trackbed.checkpoint.plan.exchange import plan_parts
from trackbed.checkpoint.plan.shard_table import join_tables, tabulate
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.fully_parallel import choose_exchange
from trackbed.megatron.checkpoints.strictness import StrictHandling


@pytest.fixture
def checkpoint(tmp_path):
    save(state("a", "b"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("strict", ["raise", "log", "ignore"])
def test_keys_that_are_not_stored_are_handled(strict, checkpoint, caplog):
    if strict == "raise":
        with pytest.raises(CheckpointError, match="c: must be a tensor of the checkpoint"):
            load(wanted("a", "c"), checkpoint)
        return
    with caplog.at_level(logging.WARNING):
        assert set(load(wanted("a", "c"), checkpoint, strict=strict)) == {"a"}
    assert ("must be stored" in caplog.text) == (strict == "log")
    assert ("['c']" in caplog.text) == (strict == "log")


@pytest.mark.parametrize("strict", [*(one.value for one in StrictHandling), StrictHandling.RETURN_ALL, None, True])
def test_other_words_for_keys_are_refused_with_the_functions_that_have_them(strict, checkpoint):
    words = f"strict: must be 'raise', 'log' or 'ignore', found {strict!r}: differing_keys .*trackbed.megatron.load"
    with pytest.raises(ArgumentError, match=words.replace("(", r"\(")):
        load(wanted("a"), checkpoint, strict=strict)


def test_keys_that_only_one_side_has_are_returned_and_nothing_is_loaded(checkpoint):
    asked = wanted("a", "c")
    assert differing_keys(asked, checkpoint) == ({"b", "o"}, {"c"})
    assert asked["a"].data.tolist() == [0] * 4
    assert differing_keys(asked, checkpoint, rename={"c": "b"}) == ({"o"}, set())


def test_keys_are_asked_for_by_all_ranks_together_and_missed_by_each(checkpoint):
    def work(group):
        return differing_keys(wanted("ab"[group.rank], f"c{group.rank}"), checkpoint, group=group)

    assert run_ranks(2, work) == [({"o"}, {"c0"}), ({"o"}, {"c1"})]


@pytest.mark.parametrize("name", ["save", "load"])
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"validate_access_integrity": False}, "validate_access_integrity"),
        ({"async_sharded_save": True}, "async_sharded_save"),
        ({"preprocess_common_before_consistancy_check": None}, "preprocess_common_before_consistancy_check"),
        ({"sharded_strategy": ("torch_dist", 1), "common_strategy": None}, "common_strategy, sharded_strategy"),
        ({"process_group": None, "verify_integrity": True}, r"process_group.*, verify_integrity"),
        ({"async_strategy": "mcore"}, "async_strategy"),
        ({"third": ("torch_dist", 1)}, "3 arguments without a name"),
    ],
)
def test_arguments_of_megatron_core_are_refused_with_the_function_that_has_them(name, options, found, tmp_path):
    arguments = [options["third"]] if "third" in options else []
    options = {key: value for key, value in options.items() if key != "third"}
    function = {"save": save, "load": load}[name]
    with pytest.raises(ArgumentError, match=rf"{name}: .*found {found}.*: call trackbed.megatron.{name}, which has"):
        function(state("a"), tmp_path / "checkpoint", *arguments, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_argument_of_megatron_core_is_refused_with_the_own_one(tmp_path):
    with pytest.raises(ArgumentError, match=r"checkpoint_dir \(here folder\), sharded_state_dict \(here state\): "):
        save(sharded_state_dict=state("a"), checkpoint_dir=tmp_path / "checkpoint")
    with pytest.raises(ArgumentError, match=r"validate_access_integrity \(here allow_parts=True for False\)"):
        load(wanted("a"), tmp_path / "checkpoint", validate_access_integrity=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stric'"):
        load(wanted("a"), tmp_path / "checkpoint", stric="log")


def test_the_description_of_the_contents_is_loaded_with_the_plain_values(tmp_path):
    save({"step": 1}, tmp_path / "checkpoint", content_metadata={"version": 3})
    assert load(tmp_path / "checkpoint") == {"step": 1, "content_metadata": {"version": 3}}
    assert serialization.load_content_metadata(tmp_path / "checkpoint") == {"version": 3}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_names_of_torchs_objects_are_keys(tmp_path):
    dcp.save({"a": torch.arange(4.0), "epoch": 7}, checkpoint_id=str(tmp_path / "torchs"), no_dist=True)
    assert differing_keys(wanted("a"), tmp_path / "torchs") == ({"epoch"}, set())
    for strict in ("raise", "log", "ignore"):
        assert torch.equal(load(wanted("a"), tmp_path / "torchs", strict=strict)["a"], torch.arange(4.0))


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
    with pytest.raises(CheckpointError, match=r"must be another folder than the working directory|found an empty text"):
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


def test_holes_are_saved_and_loaded_where_that_is_wanted(tmp_path):
    half = {"w": tensor("w", torch.ones(2), (0, 1, 2))}
    with pytest.raises(CheckpointError, match=r"w: main replicas must cover all elements, but no rank has \[0:2\]$"):
        save(half, tmp_path / "checkpoint")
    serialization.save(half, tmp_path / "checkpoint", validate_access_integrity=False)
    with pytest.raises(CheckpointError, match="load parts with allow_parts=True"):
        load(half, tmp_path / "checkpoint")
    found = load(half, tmp_path / "checkpoint", allow_parts=True)
    assert found["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="all 4 elements"):
        load({"w": tensor("w", torch.ones(4))}, tmp_path / "checkpoint")


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
        assert part.num_bytes <= 16 << 20
        assert sorted(table.rank[part.rows].tolist()) == [0, 1]
        loads[part.reader] += part.num_bytes
        seen[tuple(slice(low, low + size) for low, size in zip(part.first, part.shape, strict=True))] += 1
    assert seen.min() == seen.max() == 1
    assert abs(loads[0] - loads[1]) <= 16 << 20
