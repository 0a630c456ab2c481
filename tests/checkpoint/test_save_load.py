"""Saved on some ranks, loaded on others."""

import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints.states import check_loaded, shardings, state_of, worlds
from tests.support.tiers import with_files
from trackbed.checkpoint import find_damage, open_checkpoint
from trackbed.checkpoint.load import load
from trackbed.checkpoint.plan.assignment import assign_balanced
from trackbed.checkpoint.ranks import Meeting, meet
from trackbed.checkpoint.save import agree_on_plan, save
from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.comm import SOLO, run_ranks
from trackbed.comm.store_group import StoreGroup
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.strategies import SaveShardedStrategy


def tensor(key, data, *cuts, **options):
    return ShardedTensor.from_rank_offsets(key, data, *cuts, **options)


def save_by_megatrons_function(state, path, *, group):
    with meet("save", group):
        serialization.save(state, path)


def load_by_megatrons_function(state, path, *, group):
    with meet("load", group):
        return serialization.load(state, path)


@with_files
@given(st.data())
def test_what_is_saved_in_one_layout_is_loaded_in_any_other(data):
    world = data.draw(worlds())
    before = data.draw(shardings(world, data.draw(st.sampled_from([1, 2, 3, 4, 8]))))
    after = data.draw(shardings(world, data.draw(st.sampled_from([1, 2, 3, 4, 8]))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        run_ranks(before.num_ranks, lambda group: save(state_of(world, before, group.rank), path, group=group))

        def check(group):
            request = state_of(world, after, group.rank, is_empty=True)
            check_loaded(world, after, group.rank, request, load(request, path, group=group))

        run_ranks(after.num_ranks, check)


def test_the_callers_state_is_left_as_it_is(tmp_path):
    one = tensor("w", torch.arange(6.0).view(2, 3), replica_id=0)
    state = {"a": [one], "n": LocalNonpersistentObject(3), "x": 5}
    save(state, tmp_path / "checkpoint", content_metadata={"version": 2})
    assert state == {"a": [one], "n": state["n"], "x": 5}
    request = {"a": [one.without_data()], "n": LocalNonpersistentObject(4)}
    loaded = load(request, tmp_path / "checkpoint")
    assert request["a"][0].data is None
    assert torch.equal(loaded.pop("a")[0], one.data)
    assert loaded == {"n": 4, "x": 5, "content_metadata": {"version": 2}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_reads_what_we_save_and_we_read_what_torch_saves(tmp_path):
    numbers = {
        "w": torch.randn(8, 12),
        "b": torch.randn(7).bfloat16(),
        "s": torch.tensor(3.5),
        "l": torch.randn(3, 300, 200),
    }
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def layers(group):
        return [
            tensor("l", layer, (0, number, 3), prepend_axis_num=1, replica_id=group.rank)
            for number, layer in enumerate(numbers["l"])
        ]

    def work(group):
        half = slice(group.rank * 4, group.rank * 4 + 4)
        save(
            {
                "w": tensor("w", numbers["w"][half], (0, group.rank, 2)),
                "b": tensor("b", numbers["b"], replica_id=group.rank),
                "s": tensor("s", numbers["s"], replica_id=group.rank),
                "l": layers(group),
            },
            ours,
            group=group,
        )

    run_ranks(2, work)
    found = {key: torch.zeros_like(value) for key, value in numbers.items()}
    dcp.load(found, checkpoint_id=str(ours), no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in numbers.items())

    dcp.save({**numbers, "t": numbers["l"].permute(2, 0, 1), "n": {"x": 5}}, checkpoint_id=str(theirs), no_dist=True)
    loaded = load(
        {
            "w": tensor("w", torch.zeros(8, 6), (1, 1, 2)),
            "t": tensor("t", torch.zeros(100, 3, 300), (0, 1, 2)),
            "s": tensor("s", torch.zeros(())),
        },
        theirs,
        allow_parts=True,
    )
    assert torch.equal(loaded["w"], numbers["w"][:, 6:])
    assert torch.equal(loaded["t"], numbers["l"].permute(2, 0, 1)[100:])
    assert loaded["s"] == 3.5


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": (tensor("w", torch.zeros(1)),)}, "one is in the tuple at a"),
        ({"a": {"b": [tensor("w", torch.zeros(1)), 3]}}, "the elements of the list at a.b must all be shards"),
        ({"a": [LocalNonpersistentObject(3), 3]}, "the elements of the list at a must all be shards"),
        (
            {"a": tensor("w", torch.zeros(1), (0, 0, 2))},
            r"w: main replicas must cover all elements, but no rank has \[1:2\]",
        ),
        (
            {"a": tensor("w", torch.zeros(1)), "b": ShardedObject("w", 3, (1,), (0,))},
            "w: all shards must have one kind",
        ),
        ({"a": tensor("w", torch.zeros(1)).without_data()}, "w: a tensor that is saved must have data"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_refused_and_nothing_is_left(tmp_path, state, words):
    for size in (1, 2):

        def work(group):
            with pytest.raises(CheckpointError, match=words):
                save(state if group.rank == 0 else {}, tmp_path / "checkpoint", group=group)

        run_ranks(size, work)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (tensor("v", torch.zeros(4)), "v: must be a tensor of the checkpoint, but is not there"),
        (ShardedObject("o", None, (2,), (0,)), "o/shard_0_2: must be an object of the checkpoint, but is not there"),
        (tensor("w", torch.zeros(5)), r"w: must have the shape \(5,\) that is wanted, but is stored as \(4,\)"),
        (
            tensor("w", torch.zeros(4, dtype=torch.int32)),
            "w: values of torch.float32 must be loaded into a type that can hold",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(tmp_path, request_, words):
    save({"w": tensor("w", torch.arange(4.0))}, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=words):
        load({"x": request_}, tmp_path / "checkpoint")


@pytest.mark.parametrize("rename", [{"v": "w"}, lambda key: "w" if key == "v" else key])
def test_a_tensor_may_have_another_key_than_the_stored_one(tmp_path, rename):
    save({"w": tensor("w", torch.arange(4.0)), "u": tensor("u", torch.ones(2))}, tmp_path / "checkpoint")
    request = {"x": tensor("v", torch.zeros(4)), "y": tensor("u", torch.zeros(2))}
    loaded = load(request, tmp_path / "checkpoint", rename=rename)
    assert loaded["x"] is request["x"].data
    assert (loaded["x"].tolist(), loaded["y"].tolist(), request["x"].key) == ([0.0, 1.0, 2.0, 3.0], [1.0, 1.0], "v")
    with pytest.raises(CheckpointError, match="nowhere: must be a tensor of the checkpoint"):
        load(request, tmp_path / "checkpoint", rename={"v": "nowhere"})


def test_a_shape_may_differ_where_that_is_allowed(tmp_path):
    save({"w": tensor("w", torch.arange(4.0))}, tmp_path / "checkpoint")
    for size in (2, 6):
        found = load({"x": tensor("w", torch.ones(size), allow_shape_mismatch=True)}, tmp_path / "checkpoint")
        assert found["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0][:size]


def test_a_cast_is_made_if_it_is_exact_or_asked_for(tmp_path):
    save({"w": tensor("w", torch.tensor([1.0, 2.5]))}, tmp_path / "checkpoint")
    request = {"x": tensor("w", torch.zeros(2, dtype=torch.bfloat16))}
    assert load({"x": tensor("w", torch.zeros(2, dtype=torch.float64))}, tmp_path / "checkpoint")["x"].tolist() == [
        1.0,
        2.5,
    ]
    assert load(request, tmp_path / "checkpoint", allow_cast=True)["x"].tolist() == [1.0, 2.5]


@pytest.mark.parametrize("target", ["absent", "empty", "checkpoint", "other files"])
def test_a_checkpoint_takes_any_folder(tmp_path, target):
    path = tmp_path / "checkpoint"
    if target != "absent":
        path.mkdir()
    if target == "other files":
        (path / "notes").write_text("mine")
    if target == "checkpoint":
        save({"w": tensor("w", torch.zeros(3)), "old": 1}, path)
    run_ranks(2, lambda group: save({"w": tensor("w", torch.ones(3), replica_id=group.rank)}, path, group=group))
    found = load({"w": tensor("w", torch.zeros(3))}, path)
    assert found["w"].tolist() == [1.0] * 3
    assert "old" not in found
    assert list(tmp_path.iterdir()) == [path]
    assert (path / "notes").exists() == (target == "other files")


def error_or(function, *arguments):
    """Result of a function, or the text of its CheckpointError."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        return str(error)


def test_files_beside_a_checkpoint_that_is_replaced_stay(tmp_path):
    path = tmp_path / "checkpoint"
    (path / "notes").mkdir(parents=True)
    (path / "notes" / "one.txt").write_text("mine")
    (path / "latest").symlink_to("nowhere")
    for value in (1.0, 2.0, 3.0):
        save({"w": tensor("w", torch.full((4,), value))}, path)
        assert load({"w": tensor("w", torch.zeros(4))}, path)["w"].tolist() == [value] * 4
        assert (path / "notes" / "one.txt").read_text() == "mine"
        assert (path / "latest").readlink() == Path("nowhere")
    assert {file.name for file in path.iterdir()} == {
        *("notes", "latest", "__0_0.distcp", ".metadata", "metadata.json", "common.pt", "trackbed.extents"),
    }
    assert list(tmp_path.iterdir()) == [path]


def test_stored_boxes_that_overlap_make_up_for_no_hole(tmp_path):
    path = tmp_path / "checkpoint"

    def work(group):
        low, size = [(0, 2), (1, 2), (4, 2)][group.rank]
        entry = ShardedTensor("w", torch.ones(size), torch.float32, (size,), (6,), (low,), None)
        with meet("save", group):
            serialization.save({"w": entry}, path, validate_access_integrity=False)

    run_ranks(3, work)
    words = r"w: all 6 elements of \[0:6\] must be stored once, but 6 are, some of them twice"
    with pytest.raises(CheckpointError, match=words):
        load({"w": tensor("w", torch.zeros(6))}, path)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)["w"][:]
    longer = ShardedTensor.from_rank_offsets("w", torch.zeros(7), allow_shape_mismatch=True)
    with pytest.raises(CheckpointError, match=words):
        load({"w": longer}, path)
    assert any("some of them twice" in problem for problem in find_damage(path))
    assert open_checkpoint(path)["w"][4:].tolist() == [1, 1]


def test_objects_count_in_the_balance(tmp_path):
    def work(group):
        state = {f"w{n}": tensor(f"w{n}", torch.ones(1 << 18), replica_id=group.rank) for n in range(4)}
        if group.rank == 0:
            state |= {f"o{n}": ShardedObject(f"o{n}", bytes(1 << 20), (1,), (0,)) for n in range(4)}
        save(state, tmp_path / "checkpoint", group=group)

    run_ranks(2, work)
    sizes = [file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.distcp")]
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "common.pt"])
@pytest.mark.parametrize("loads", [load, load_by_megatrons_function])
def test_a_flipped_byte_of_a_description_is_an_error_on_every_rank(name, loads, tmp_path):
    path = tmp_path / "checkpoint"
    save({"w": tensor("w", torch.ones(5))}, path)
    file = path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert any(text.startswith(f"{name}: ") for text in find_damage(path))

    def work(group):
        with pytest.raises(CheckpointError, match=rf"rank 0.*: {name}: must "):
            loads({"w": tensor("w", torch.zeros(5), replica_id=group.rank)}, path, group=group)

    run_ranks(1, work)
    run_ranks(2, work)


def test_each_flipped_byte_gives_right_values_or_an_error_with_the_file(tmp_path):
    path = tmp_path / "checkpoint"
    state = {"w": tensor("w", torch.arange(50.0)), "o": ShardedObject("o", {"x": 3}, (1,), (0,)), "common": [1, 2]}
    save(state, path)
    request = {"w": state["w"].without_data(), "o": state["o"].without_data()}
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 7):
            file.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
            found = error_or(load, request, path)
            if isinstance(found, str):
                assert file.name in found
                continue
            assert torch.equal(found["w"], state["w"].data)
            assert (found["o"], found["common"]) == ({"x": 3}, [1, 2])
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=file.name):
            load(request, path)
        file.unlink()
        if file.name != "trackbed.extents":
            with pytest.raises(CheckpointError, match=file.name):
                load(request, path)
        file.write_bytes(content)
    load(request, path)


def test_a_plan_is_used_again_for_the_same_structure_only(tmp_path, monkeypatch):
    gathered = []

    def counted(gather):
        def count(meeting, *contents):
            gathered.append(meeting.rank)
            return gather(meeting, *contents)

        return count

    for name in ("gather", "gather_to_first"):
        monkeypatch.setattr(Meeting, name, counted(getattr(Meeting, name)))

    def work(group):
        contents = []
        for step in range(4):
            state = {"w": tensor("w", torch.full((5,), float(step)), replica_id=group.rank)}
            if step == 2 and group.rank == 1:
                state["new"] = tensor("new", torch.ones(2))
            if step == 3:
                state["w"] = tensor("w", torch.full((5,), float(step)), replica_id=1 - group.rank)
            path = tmp_path / str(step)
            save(state, path, group=group)
            group.barrier()
            contents.append((path / ".metadata").read_bytes())
            request = {"w": tensor("w", torch.zeros(5)), "new": tensor("new", torch.zeros(2))}
            if step != 2:
                del request["new"]
            loaded = load(request, path, allow_parts=True, group=group)
            assert loaded["w"].tolist() == [step] * 5
        return contents

    for contents in run_ranks(2, work):
        assert contents[0] == contents[1] != contents[2]
    # Tables in saves 0, 2 and 3, what was written in all, and tables of all loads.
    assert len(gathered) == 2 * (3 + 4 + 4)


def test_a_plan_that_was_not_checked_is_not_used_by_a_save_that_checks(tmp_path):
    def work(group):
        state = {"w": tensor("w", torch.ones(4))}
        with meet("save", group) as meeting:
            agree_on_plan(meeting, list(state.values()), {}, assign_balanced, validates=False)
        with pytest.raises(CheckpointError, match="w: main replicas must cover each element once"):
            save(state, tmp_path / "checked", group=group)

    run_ranks(2, work)


@pytest.mark.parametrize(("saves", "first", "later"), [(save, 5, 4), (save_by_megatrons_function, 8, 7)])
def test_an_unchanged_save_takes_few_meetings(saves, first, later, tmp_path, monkeypatch):
    counts = Counter()

    def count(group, *arguments, rendezvous=StoreGroup._rendezvous):
        counts[group.rank] += 1
        return rendezvous(group, *arguments)

    monkeypatch.setattr(StoreGroup, "_rendezvous", count)

    def work(group):
        used = []
        for step in range(3):
            before = counts[group.rank]
            saves({"w": tensor("w", torch.ones(5), replica_id=group.rank)}, tmp_path / str(step), group=group)
            used.append(counts[group.rank] - before)
        return used

    assert run_ranks(2, work) == [[first, later, later]] * 2


class OwnStrategy(SaveShardedStrategy):
    """Strategy of a program, whose ranks do not meet."""

    def __init__(self, rank):
        super().__init__("torch_dist", 1)
        self.rank = rank

    def save(self, sharded_state_dict, checkpoint_dir):
        if self.rank == 1:
            time.sleep(0.3)
            raise ValueError("no")


def test_what_a_strategy_raises_on_one_rank_keeps_the_folder_as_it_was(tmp_path):
    path = tmp_path / "checkpoint"
    save({"w": tensor("w", torch.ones(5))}, path)

    def work(group):
        with pytest.raises(CheckpointError, match="rank 1: ValueError: no"), meet("save", group):
            serialization.save({"w": tensor("w", torch.zeros(5), replica_id=group.rank)}, path, OwnStrategy(group.rank))

    run_ranks(2, work)
    assert load({"w": tensor("w", torch.zeros(5))}, path)["w"].tolist() == [1] * 5
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_whose_name_is_no_text_is_saved_to_and_loaded(size, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9") / "step"

    def work(group):
        save({"w": tensor("w", torch.arange(4.0), replica_id=group.rank), "step": 3}, folder, group=group)
        target = torch.zeros(4)
        loaded = load({"w": tensor("w", target)}, folder, group=group, allow_parts=True)
        return loaded["w"].tolist(), loaded["step"]

    assert run_ranks(size, work) == [([0.0, 1.0, 2.0, 3.0], 3)] * size


def test_a_tensor_that_overlaps_itself_is_refused_before_anything_is_filled(tmp_path):
    save({"a": tensor("a", torch.ones(4)), "w": tensor("w", torch.ones(3, 4))}, tmp_path / "it", group=SOLO)
    first = torch.zeros(4)
    with pytest.raises(CheckpointError, match="w: the tensor to fill must have memory for each element, but is expan"):
        load({"a": tensor("a", first), "w": tensor("w", torch.zeros(1, 4).expand(3, 4))}, tmp_path / "it", group=SOLO)
    assert first.tolist() == [0.0] * 4
