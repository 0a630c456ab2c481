"""Checkpoints in an object store: a save is the checkpoint or nothing, and what it leaves behind is found."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from functools import partial
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from tests.support import ROOT
from trackbed import sharded_state
from trackbed.checkpoint import (
    ShardedObject,
    ShardedTensor,
    latest_checkpoint,
    load,
    open_checkpoint,
    save,
    stored_save,
)
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.dcp import StorageReader, StorageWriter
from trackbed.checkpoint.format.marker import MARKER_NAME, Marker, UnfinishedSave
from trackbed.checkpoint.io import object_writer
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.leftovers import find_leftovers
from trackbed.checkpoint.stored_save import change_marker
from trackbed.cli.main import trackbed
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError, StoreError
from trackbed.files.publish import Writer, own_writer


@pytest.fixture
def bucket(any_bucket):
    """A new bucket, of moto's server and in the full tier of Ceph's."""
    return any_bucket


def rows_of(rank, num_rows=10_000):
    """Numbers of a rank."""
    return torch.rand((num_rows, 4), generator=torch.Generator().manual_seed(rank))


def state_of(group, value, num_elements=40_000):
    """A state of which each rank has a part."""
    rank, size = group.rank, group.size
    rows = rows_of(rank, num_elements // 4) + value
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, size)),
        "copies": ShardedTensor.from_rank_offsets("copies", torch.full((1000,), float(value)), replica_id=rank),
        "object": ShardedObject("object", {"value": value}, (size,), (rank,)),
        "plain": torch.arange(10),
        "step": value,
    }


def value_of(address):
    """The one number of a checkpoint, which must be whole."""
    assert list(find_damage(address)) == []
    found = load({"copies": ShardedTensor.from_rank_offsets("copies", torch.zeros(1000))}, address, group=SOLO)
    assert found["copies"].unique().tolist() == [found["step"]]
    return found["step"]


def saves_in(bucket, folder):
    """Ids of the saves of which there are objects in a folder."""
    keys = [key for key in list(bucket.keys()) if key.startswith(f"{folder}/")]
    return {key.removeprefix(f"{folder}/").split("/")[0] for key in keys} - {MARKER_NAME}


@pytest.fixture
def small_objects(monkeypatch):
    """Has items cut, and objects filled, at 64 KiB."""
    monkeypatch.setattr(object_writer, "OBJECT_BYTES", 64 << 10)
    monkeypatch.setattr("trackbed.checkpoint.stored_save.StoredSave.most_item_bytes", 64 << 10)


@pytest.mark.parametrize("size", [1, 3])
def test_a_state_comes_back_on_other_numbers_of_ranks(size, bucket, small_objects):
    address = bucket.text("run/step-1")
    run_ranks(size, lambda group: save(state_of(group, 7), address, group=group))
    assert value_of(address) == 7
    num_rows = 10_000 * size

    def loaded(group):
        rows = ShardedTensor.from_rank_offsets("rows", torch.zeros(num_rows // 2, 4), (0, group.rank, 2))
        return load({"rows": rows}, address, group=group)

    found = run_ranks(2, loaded)
    wanted = torch.cat(
        [torch.rand((10_000, 4), generator=torch.Generator().manual_seed(rank)) + 7 for rank in range(size)]
    )
    assert torch.equal(torch.cat([one["rows"] for one in found]), wanted)
    assert found[0]["plain"].tolist() == list(range(10))
    opened = open_checkpoint(address)
    assert torch.equal(opened["rows"][5:9, 1:3], wanted[5:9, 1:3])
    assert opened.load_object(f"object/shard_0_{size}") == {"value": 7}
    (save_id,) = saves_in(bucket, "run/step-1")
    keys = bucket.keys()
    assert sum(f"{save_id}/__0_" in key for key in keys) > 1


def test_a_save_replaces_the_one_before_and_leaves_nothing_of_it(bucket, caplog):
    address = bucket.text("step-1")
    for value in (1, 2):
        with caplog.at_level(logging.WARNING):
            save(state_of(SOLO, value), address)
        assert value_of(address) == value
        assert len(saves_in(bucket, "step-1")) == 1
    assert f"{address}: a checkpoint that was there has been replaced" in caplog.messages


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_downloaded_checkpoint_is_a_folder_for_every_reader_and_one_that_is_uploaded_is_loaded(bucket, tmp_path):
    address = bucket.text("step-1")
    save({"weight": torch.arange(24.0).view(4, 6), "rows": state_of(SOLO, 3)["rows"], "step": 3}, address)
    (save_id,) = saves_in(bucket, "step-1")
    keys = [key for key in list(bucket.keys()) if f"/{save_id}/" in key]
    (tmp_path / "down").mkdir()
    for key in keys:
        (tmp_path / "down" / key.rpartition("/")[2]).write_bytes(bucket.get(key))
    assert load(tmp_path / "down")["step"] == 3
    rows = {"rows": torch.zeros(10_000, 4)}
    dcp.load(rows, checkpoint_id=str(tmp_path / "down"))
    assert torch.equal(rows["rows"], open_checkpoint(address)["rows"][...])
    for path in (tmp_path / "down").iterdir():
        bucket.put(f"uploaded/step-5/{path.name}", path.read_bytes())
    uploaded = bucket.text("uploaded/step-5")
    assert load(uploaded)["step"] == 3
    assert latest_checkpoint(bucket.text("uploaded/")) == uploaded
    save({"step": 4}, uploaded)  # takes the place of the uploaded files
    assert load(uploaded) == {"step": 4}
    assert len(saves_in(bucket, "uploaded/step-5")) == 1


def test_the_latest_checkpoint_is_one_that_is_committed(bucket, caplog):
    run = bucket.text("run")
    assert latest_checkpoint(run) is None
    for step in (9, 10):
        save({"step": step}, f"{run}/step-{step}")
    begun = StoredFolder(f"{run}/step-11")
    change_marker(begun, lambda marker: marker.with_unfinished(UnfinishedSave("0" * 32, "host.1.2")))
    assert latest_checkpoint(run) == f"{run}/step-10"
    (save_id,) = saves_in(bucket, "run/step-10")
    bucket.delete(f"run/step-10/{save_id}/common.pt")
    assert latest_checkpoint(run) == f"{run}/step-9"
    assert "step-10: is passed over, because it is not whole: common.pt: must be in" in caplog.text
    with pytest.raises(CheckpointError, match="must be a folder of checkpoints, but is a checkpoint itself"):
        latest_checkpoint(f"{run}/step-9")


@pytest.mark.parametrize("who", [0, 2])
def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_before(who, bucket, monkeypatch):
    address = bucket.text("step-1")
    save(state_of(SOLO, 1), address)
    put, failures = object_writer.stores.put_buffers, [who]

    def failing(where, buffers):
        if f"__{who}_" in where.text and failures:
            failures.clear()
            raise StoreError(f"{where.text}: the store is gone")
        put(where, buffers)

    monkeypatch.setattr(object_writer.stores, "put_buffers", failing)

    def run(group):
        with pytest.raises(CheckpointError, match=rf"save: rank {who}: StoreError: {address}.*: the store is gone"):
            save(state_of(group, 2), address, group=group)
        group.barrier()
        if group.rank == 0:
            assert value_of(address) == 1
            assert len(saves_in(bucket, "step-1")) == 1
        group.barrier()
        save(state_of(group, 3), address, group=group)

    run_ranks(3, run)
    assert value_of(address) == 3


def test_of_two_saves_at_once_one_is_the_checkpoint_and_nothing_is_left_of_the_other(bucket):
    address, barrier = bucket.text("step-1"), threading.Barrier(2)

    def run(value):
        barrier.wait()
        for _ in range(5):
            save(state_of(SOLO, value), address, group=SOLO)

    threads = [threading.Thread(target=partial(run, value)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        # A reader may be told that it was replaced, or, at first, that there is none; what it reads is of one save.
        with contextlib.suppress(CheckpointError):
            assert open_checkpoint(address).load_common()["step"] in (1, 2)
    for thread in threads:
        thread.join()
    assert value_of(address) in (1, 2)
    assert len(saves_in(bucket, "step-1")) == 1


def test_a_save_that_another_program_has_given_up_cannot_commit(bucket, monkeypatch):
    address = bucket.text("step-1")
    put = object_writer.stores.put_buffers

    def put_and_give_up(where, buffers):
        put(where, buffers)
        folder = StoredFolder(address)
        change_marker(folder, lambda marker: marker.without_unfinished({one.save_id for one in marker.unfinished}))

    monkeypatch.setattr(object_writer.stores, "put_buffers", put_and_give_up)
    with pytest.raises(CheckpointError, match="another program has given this save up since"):
        save({"rows": state_of(SOLO, 1)["rows"]}, address)
    assert saves_in(bucket, "step-1") == set()


def test_what_dead_processes_have_left_is_removed_by_the_next_save(bucket):
    address = bucket.text("step-1")
    folder, dead, elsewhere = StoredFolder(address), "a" * 32, "b" * 32
    host = own_writer().split(".")[0]
    for save_id, writer in ((dead, f"{host}.999999999.5"), (elsewhere, "another-1.5.5")):
        change_marker(folder, methodcaller("with_unfinished", UnfinishedSave(save_id, writer)))
        bucket.put(f"step-1/{save_id}/__0_0.distcp", b"1")
    save({"step": 1}, address)
    assert dead not in saves_in(bucket, "step-1")
    assert elsewhere in saves_in(bucket, "step-1")
    assert [one.save_id for one in folder.marker().unfinished] == [elsewhere]


def test_a_checkpoint_that_is_replaced_or_damaged_while_it_is_read_is_named(bucket):
    address = bucket.text("step-1")
    save(state_of(SOLO, 1, 400_000), address)
    opened = open_checkpoint(address)
    save(state_of(SOLO, 2), address)
    with pytest.raises(
        CheckpointError, match=f"{address}: must be the checkpoint that was opened, but has been replaced"
    ):
        opened["rows"][...]
    opened = open_checkpoint(address)
    (name,) = {key for key in list(bucket.keys()) if key.endswith("__0_0.distcp")}
    content = bytearray(bucket.get(name))
    content[len(content) // 2] ^= 1
    bucket.put(name, bytes(content))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp.*(is damaged|another one in its place)"):
        opened["rows"][...]
    assert any("is damaged" in problem for problem in find_damage(address))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"version":2}', b"\xff" * 100])
def test_a_marker_that_is_none_is_named(content, bucket):
    bucket.put(f"step-1/{MARKER_NAME}", content)
    for call in (open_checkpoint, partial(save, {"step": 1})):
        with pytest.raises(CheckpointError, match=f"step-1/{MARKER_NAME}: must be a marker"):
            call(bucket.text("step-1"))


@pytest.mark.parametrize("name", ["../secret", "a/b", "", ".."])
def test_a_marker_with_a_file_elsewhere_is_refused(name):
    from trackbed.checkpoint.format.extents import FileChecksum
    from trackbed.checkpoint.format.marker import CommittedSave

    content = Marker(CommittedSave("0" * 32, {name: FileChecksum(1, 2)})).encode()
    with pytest.raises(CheckpointError, match="must name saves and files of a checkpoint"):
        Marker.decode(content, "s3://bucket/step-1/trackbed.marker")


def test_a_store_without_conditional_writes_is_named_at_the_first_save(bucket, monkeypatch):
    monkeypatch.setattr(stored_save, "_checked", set())
    put_if = stored_save.stores.put_if

    def ignoring(address, raw, expected):
        stored_save.stores.delete_object(address)
        return put_if(address, raw, None)

    monkeypatch.setattr(stored_save.stores, "put_if", ignoring)
    with pytest.raises(CheckpointError, match="must have conditional writes"):
        save({"step": 1}, bucket.text("step-1"))
    assert saves_in(bucket, "step-1") == set()


def test_faults_on_the_way_end_in_the_old_checkpoint_or_the_new_one(bucket, proxy, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "2")
    address = bucket.text("step-1")
    save(state_of(SOLO, 0), address)
    values, texts = {0}, []
    generator = np.random.default_rng(1)
    faults = [500, 503, 429, "reset", "lost answer", "cut", 403]
    for value in range(1, 13):
        proxy.faults = [None] * int(generator.integers(0, 10)) + [faults[value % len(faults)]]
        try:
            save(state_of(SOLO, value), address)
        except CheckpointError as error:
            texts.append(str(error))
            values.add(value)
        else:
            values = {value}
        proxy.faults = []
        found = value_of(address)
        assert found in values
        values = {found}
    assert texts
    assert all(address in text for text in texts)
    folder = StoredFolder(address)
    known = {one.save_id for one in folder.marker().unfinished} | {folder.opened().save_id}
    assert saves_in(bucket, "step-1") <= known


def test_secrets_are_in_no_message(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-key")
    with pytest.raises(CheckpointError, match="found one with a username") as caught:
        save({"step": 1}, "s3://user:another-secret-key@bucket/step-1")
    assert "another-secret-key" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_doors_of_dcp_take_addresses(bucket):
    address = bucket.text("step-1")
    weight = torch.arange(24.0).view(4, 6)
    dcp.save({"model": {"weight": weight}, "step": 5}, storage_writer=StorageWriter(address), no_dist=True)
    assert list(find_damage(address)) == []
    state = {"model": {"weight": torch.zeros(4, 6)}, "step": 0}
    dcp.load(state, storage_reader=StorageReader(address), no_dist=True)
    assert torch.equal(state["model"]["weight"], weight)
    assert state["step"] == 5
    assert torch.equal(open_checkpoint(address)["model.weight"][...], weight)
    assert len(saves_in(bucket, "step-1")) == 1


def test_the_command_line_takes_addresses(bucket, tmp_path):
    address, run = bucket.text("run/step-1"), bucket.text("run")
    model = torch.nn.Linear(3, 2)
    save(sharded_state(model), address)
    save(sharded_state(model), tmp_path / "local")

    def call(*arguments, status=0):
        found = CliRunner().invoke(trackbed, ["ckpt", *arguments])
        assert found.exit_code == status, found.output
        return found.output

    assert "model.weight" in call("ls", address)
    assert "saved by: trackbed" in call("inspect", address)
    assert f"{address}: ok" in call("verify", address)
    assert "equal: 2 tensors" in call("diff", address, str(tmp_path / "local"))
    assert "2 tensors" in call("export", address, str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "0 unfinished saves" in call("clean", run)
    folder, ids = StoredFolder(address), ["a" * 32, "b" * 32, "c" * 32]
    host = own_writer().split(".")[0]
    for save_id, writer in zip(ids, (f"{host}.999999999.5", "another-1.5.5"), strict=False):
        change_marker(folder, methodcaller("with_unfinished", UnfinishedSave(save_id, writer)))
    for save_id in ids:
        bucket.put(f"run/step-1/{save_id}/__0_0.distcp", b"123")
    listed = call("clean", run)
    assert [f"{one}: 1 object, 3 bytes" in listed for one in ids] == [True] * 3
    assert "of which nothing is known here" in listed
    assert "3 unfinished saves; --remove removes 2 of them" in listed
    assert "removed 2 unfinished saves" in call("clean", run, "--remove")
    assert "1 unfinished save" in call("clean", run)
    assert "removed 1 unfinished save" in call("clean", run, "--remove", "--all")
    assert len(saves_in(bucket, "run/step-1")) == 1
    assert f"{address}: ok" in call("verify", address)
    name = next(key for key in list(bucket.keys()) if key.endswith("__0_0.distcp"))
    bucket.put(name, b"1")
    assert "__0_0.distcp: must have" in call("verify", address, status=1)


@pytest.mark.parametrize("count", [5, pytest.param(500, marks=pytest.mark.slow)])
def test_whatever_happens_the_checkpoint_is_the_one_before_or_a_new_one(count, moto_endpoint, request):
    endpoint = moto_endpoint if count < 100 else request.getfixturevalue("ceph_endpoint")
    script = Path(__file__).parent / "stored_faults.py"
    command = [sys.executable, "-W", "ignore", str(script), endpoint, str(count), "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 + 5 * count, check=False
    )
    assert found.returncode == 0, found.stderr
    problems, kinds = json.loads(found.stdout)
    assert problems == []
    assert sum(kinds.values()) == count


@pytest.mark.parametrize("call", [load, open_checkpoint, partial(save, {"step": 1})])
def test_a_bucket_that_is_not_there_is_named(call, bucket):
    with pytest.raises((CheckpointError, StoreError), match="s3://no-such-bucket-here: the bucket must be there"):
        call("s3://no-such-bucket-here/step-1")


def test_a_save_that_has_just_begun_is_not_taken_for_dead(bucket, monkeypatch):
    monkeypatch.setattr(stored_save, "_checked", set())
    put_if, states = stored_save.stores.put_if, []

    def put_and_look(address, raw, expected):
        found = put_if(address, raw, expected)
        if address.text.endswith("trackbed.probe"):
            states.extend(one.state for one in find_leftovers(bucket.text("run")))
        return found

    monkeypatch.setattr(stored_save.stores, "put_if", put_and_look)
    save({"step": 1}, bucket.text("run/step-1"))
    assert set(states) == {Writer.living}


def test_no_marker_is_ever_removed_as_a_late_request_would_remove_that_of_a_later_save(bucket, monkeypatch):
    """A request to remove that arrives late, after its program has given it up, must find nothing that counts."""
    removed, (delete, delete_all) = [], (stored_save.stores.delete_object, stored_save.stores.delete_objects)
    monkeypatch.setattr(stored_save.stores, "delete_object", lambda one: (removed.append(one.text), delete(one)))

    def delete_and_note(addresses):
        found = list(addresses)
        removed.extend(one.text for one in found)
        delete_all(found)

    monkeypatch.setattr(stored_save.stores, "delete_objects", delete_and_note)
    address, folder = bucket.text("step-1"), StoredFolder(bucket.text("step-1"))
    with monkeypatch.context() as patch:
        patch.setattr(stored_save.StoredSave, "commit", lambda *_: (_ for _ in ()).throw(CheckpointError("it broke")))
        with pytest.raises(CheckpointError, match="it broke"):
            save({"step": 1}, address)
    save({"step": 1}, address)
    save({"step": 2}, address)
    stored_save.hide_stored_checkpoint(folder)()
    save({"step": 3}, address)
    change_marker(folder, methodcaller("with_unfinished", UnfinishedSave("a" * 32, "another-1.5.5")))
    stored_save.give_up_saves(folder, ["a" * 32])
    assert load(address)["step"] == 3
    assert len({text.split("/")[-2] for text in removed}) >= 3
    assert not any(text.endswith(MARKER_NAME) for text in removed)


def test_the_files_of_a_save_are_no_place_for_another(bucket):
    save({"step": 1}, bucket.text("step-1"))
    (save_id,) = saves_in(bucket, "step-1")
    with pytest.raises(CheckpointError, match=f"that of the files of a save: save to {bucket.text('step-1')}"):
        save({"step": 2}, bucket.text(f"step-1/{save_id}"))
    assert load(bucket.text("step-1"))["step"] == 1


def test_what_is_in_the_place_of_a_checkpoint_is_said(bucket):
    for step in (1, 2):
        save({"step": step}, bucket.text(f"run/step-{step}"))
    with pytest.raises(CheckpointError, match="there is no such object; step-2 in it is one"):
        load(bucket.text("run"))
    folder = StoredFolder(bucket.text("run/step-2"))
    save_id = folder.opened().save_id
    change_marker(folder, Marker.superseded)
    with pytest.raises(CheckpointError, match=f"it was set aside, and is at {folder}/{save_id}"):
        load(str(folder))
    assert load(f"{folder}/{save_id}")["step"] == 2
    for key in list(bucket.keys()):
        if key.startswith("run/step-1/") and not key.endswith(MARKER_NAME):
            bucket.delete(key)
    with pytest.raises(CheckpointError, match=f"which {MARKER_NAME} names, cannot be read: it has been removed"):
        load(bucket.text("run/step-1"))
    with pytest.raises(CheckpointError, match="pass an address as a string: Path turns s3:// into s3:/"):
        load(Path(bucket.text("run/step-1")))


def test_what_no_marker_names_is_removed_only_where_a_save_has_left_it(bucket, caplog):
    address, left, foreign = bucket.text("step-1"), "a" * 32, "b" * 32
    save({"step": 1}, address)
    bucket.put(f"step-1/{left}/__0_0.distcp", b"1")
    bucket.put(f"step-1/{foreign}/wandb.log", b"1")
    bucket.put(f"copied/{left}/__0_0.distcp", b"1")  # a copy under way, whose marker comes last
    stored_save.remove_unnamed_saves([StoredFolder(address), StoredFolder(bucket.text("copied"))])
    assert f"{address}/{left}/: 1 objects that a killed program had left have been removed" in caplog.text
    assert left not in saves_in(bucket, "step-1")
    assert foreign in saves_in(bucket, "step-1")
    assert saves_in(bucket, "copied") == {left}
    assert {one.address: one.state for one in find_leftovers(bucket.text("copied"))} == {
        bucket.text(f"copied/{left}"): Writer.elsewhere
    }
