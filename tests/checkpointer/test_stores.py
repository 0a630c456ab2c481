"""The checkpoints of a run in an object store: kept, removed, set aside, found, and of one job at a time."""

import logging
import time
from operator import methodcaller

import pytest
import torch

from tests.checkpoint.test_stores import saves_in, state_of, value_of
from trackbed import Checkpointer, sharded_state
from trackbed.checkpoint import load, open_checkpoint
from trackbed.checkpoint.format.marker import MARKER_NAME, Marker, UnfinishedSave
from trackbed.checkpoint.io import object_writer
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.stored_save import change_marker
from trackbed.checkpointer import lease as lease_module
from trackbed.checkpointer.lease import LEASE_NAME
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError, StoreError
from trackbed.files import stores
from trackbed.files.publish import own_writer
from trackbed.files.stores import parse_address


@pytest.fixture
def bucket(any_bucket):
    """A new bucket, of moto's server and in the full tier of Ceph's."""
    return any_bucket


def names_in(bucket, folder):
    """Names directly in a folder of a bucket, without those where a marker alone is left that names nothing."""
    keys = [
        key
        for key in list(bucket.keys())
        if not key.endswith(MARKER_NAME) or Marker.decode(bucket.get(key), key).current is not None
    ]
    return {key.removeprefix(f"{folder}/").split("/")[0] for key in keys if key.startswith(f"{folder}/")}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(1, {}, id="one", marks=pytest.mark.slow),
        pytest.param(3, {}, id="three"),
        pytest.param(2, {"writer": "process"}, id="process", marks=pytest.mark.slow),
        pytest.param(1, {"max_bytes": 1}, id="little memory"),
        pytest.param(1, {"snapshot": "deferred"}, id="deferred", marks=pytest.mark.slow),
    ],
)
def test_steps_are_saved_kept_and_found(size, options, bucket):
    address = bucket.text("run")

    def run(group):
        with Checkpointer(address, keep_last=2, keep_every=40, keep={10}, group=group, **options) as checkpointer:
            assert checkpointer.latest() is None
            assert checkpointer.load(state_of(group, 0)) is None
            for step in range(0, 80, 10):
                assert checkpointer.save(step, state_of(group, step))
            checkpointer.wait()
            group.barrier()  # rank 0 removes
            assert checkpointer.steps() == [0, 10, 40, 60, 70]
            assert checkpointer.load(state_of(group, 0))["step"] == 70
            assert checkpointer.load(state_of(group, 0), step=40)["copies"].unique().tolist() == [40.0]
            assert checkpointer.latest(verified=True) == 70
            assert checkpointer.path(70) == f"{address}/step-0000070"
            assert [record.error for record in checkpointer.history] == [None] * 8

    run_ranks(size, run)
    names = {f"step-{step:07}" for step in (0, 10, 40, 60, 70)}
    assert names_in(bucket, "run") == {LEASE_NAME, *names}
    assert all(len(saves_in(bucket, f"run/{name}")) == 1 for name in names)
    assert value_of(f"{address}/step-0000060") == 60


def test_after_an_older_step_was_loaded_later_ones_are_set_aside(bucket, caplog):
    with Checkpointer(bucket.text("run"), group=SOLO) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(SOLO, step))
        checkpointer.wait()
        checkpointer.load(state_of(SOLO, 0), step=1)
        with caplog.at_level(logging.WARNING):
            checkpointer.save(2, state_of(SOLO, 22))
            checkpointer.wait()
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.latest() == 2
    assert value_of(bucket.text("run/step-0000002")) == 22
    (save_id,) = saves_in(bucket, "run/step-0000003")
    aside = bucket.text(f"run/step-0000003/{save_id}")
    assert aside in caplog.text
    assert load(aside)["step"] == 3
    with Checkpointer(bucket.text("run"), group=SOLO) as checkpointer:
        checkpointer.save(3, state_of(SOLO, 33))
    assert value_of(bucket.text("run/step-0000003")) == 33
    assert load(aside)["step"] == 3


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_is_told_on_all_ranks_and_the_next_save_is_whole(who, bucket, monkeypatch):
    put, failures = object_writer.stores.put_buffers, [who]

    def failing(address, buffers):
        if f"__{who}_" in address.text and failures:
            failures.clear()
            raise StoreError(f"{address.text}: the store is gone")
        put(address, buffers)

    monkeypatch.setattr(object_writer.stores, "put_buffers", failing)

    def run(group):
        with Checkpointer(bucket.text("run"), group=group) as checkpointer:
            checkpointer.save(1, state_of(group, 1))
            with pytest.raises(CheckpointError, match=rf"step 1 has failed: save: rank {who}: StoreError: .*is gone"):
                checkpointer.wait()
            assert checkpointer.save(2, state_of(group, 2))
            checkpointer.wait()
            assert checkpointer.steps() == [2]

    run_ranks(2, run)
    assert names_in(bucket, "run") == {LEASE_NAME, "step-0000002"}


def test_one_job_at_a_time_keeps_checkpoints_in_a_folder(bucket, monkeypatch, caplog):
    address = bucket.text("run")
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.2)
    with (
        Checkpointer(address, group=SOLO),
        pytest.raises(CheckpointError, match=r"must be kept by one job, but .* keeps checkpoints in it"),
    ):
        Checkpointer(address, group=SOLO)
    started = time.monotonic()
    with Checkpointer(address, group=SOLO) as first:
        assert time.monotonic() - started < 1  # it was given back
        monkeypatch.setattr(lease_module, "own_writer", lambda: "another-1.5.5")
        first._run._lease._own = "elsewhere-1.5.5.0"
        time.sleep(0.5)
        with pytest.raises(CheckpointError, match="but process 5 of elsewhere keeps checkpoints in it"):
            Checkpointer(address, group=SOLO)  # it sees that the lease is renewed
        first._run._lease._ended.set()  # as if the host had lost its power
        first.save(1, state_of(SOLO, 1))
        first.wait()
        with Checkpointer(address, group=SOLO) as second:
            second.save(2, state_of(SOLO, 2))
        assert "waiting 1 s for a sign of life of it" in caplog.text
    assert value_of(f"{address}/step-0000002") == 2


def test_a_job_that_has_lost_its_lease_commits_nothing(bucket, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.1)
    address = bucket.text("run")
    checkpointer = Checkpointer(address, group=SOLO)
    stores.put_bytes(parse_address(f"{address}/{LEASE_NAME}"), b'{"writer":"another-1.5.5.0","write_id":"1"}')
    time.sleep(0.5)
    checkpointer.save(1, state_of(SOLO, 1))
    with pytest.raises(CheckpointError, match="must be kept by this job, but another job has taken it over"):
        checkpointer.wait()
    checkpointer.close()
    assert names_in(bucket, "run") == {LEASE_NAME}


def test_what_dead_jobs_have_left_is_removed_and_what_others_may_write_is_named(bucket, caplog):
    address, dead, elsewhere = bucket.text("run"), "a" * 32, "b" * 32
    host = own_writer().split(".")[0]
    for save_id, writer, step in ((dead, f"{host}.999999999.5", 1), (elsewhere, "another-1.5.5", 2)):
        folder = StoredFolder(f"{address}/step-{step:07}")
        change_marker(folder, methodcaller("with_unfinished", UnfinishedSave(save_id, writer)))
        bucket.put(f"run/step-{step:07}/{save_id}/__0_0.distcp", b"1")
    with Checkpointer(address, group=SOLO) as checkpointer:
        assert checkpointer.steps() == []
    assert names_in(bucket, "run") == {LEASE_NAME, "step-0000002"}
    assert f"step-0000002/{elsewhere} (another-1.5.5)" in caplog.text


def test_the_newest_that_is_whole_is_found_and_a_damaged_one_saved_again(bucket, caplog):
    address = bucket.text("run")

    def run(group):
        with Checkpointer(address, group=group) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state_of(group, step))
            checkpointer.wait()
            group.barrier()
            if group.rank == 0:
                name = next(key for key in list(bucket.keys()) if "step-0000002" in key and "__1_0" in key)
                content = bytearray(bucket.get(name))
                content[-2000] ^= 4
                bucket.put(name, bytes(content))
            group.barrier()
            assert checkpointer.latest() == 2
            assert checkpointer.latest(verified=True) == 1
            checkpointer.load(state_of(group, 0), step=1)
            checkpointer.save(2, state_of(group, 22))
            checkpointer.wait()
            assert checkpointer.latest(verified=True) == 2

    run_ranks(2, run)
    assert "step-0000002: is passed over, because it is not whole: __1_0.distcp: its checksum must be" in caplog.text
    assert value_of(f"{address}/step-0000002") == 22


def test_loads_while_a_save_is_in_flight_and_values_of_its_moment(bucket):
    model = torch.nn.Linear(500, 500)
    with Checkpointer(bucket.text("run"), group=SOLO) as checkpointer:
        values = []
        for step in range(5):
            with torch.no_grad():
                model.weight.fill_(float(step))
            checkpointer.save(step, {**sharded_state(model), "step": step})
            with torch.no_grad():
                model.weight.fill_(-1.0)
            latest = checkpointer.latest()
            values.append(latest if latest is None else load(checkpointer.path(latest))["step"])
        checkpointer.wait()
        for step in range(5):
            weight = open_checkpoint(checkpointer.path(step))["model.weight"][...]
            assert weight.unique().tolist() == [float(step)]
    assert all(value is None or value in range(step + 1) for step, value in enumerate(values))


def test_a_renewal_of_a_lease_whose_answer_is_lost_is_found_again(bucket, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.1)
    with Checkpointer(bucket.text("run"), group=SOLO) as checkpointer:
        put_if, lost = lease_module.stores.put_if, [True]

        def losing(*arguments):
            found = put_if(*arguments)
            if lost and arguments[0].text.endswith(LEASE_NAME):
                lost.clear()
                raise StoreError("no answer")
            return found

        monkeypatch.setattr(lease_module.stores, "put_if", losing)
        time.sleep(1)
        assert not lost
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        assert checkpointer.latest() == 1


def test_a_marker_that_cannot_be_read_keeps_no_job_from_starting(bucket, caplog):
    address = bucket.text("run")
    with Checkpointer(address, group=SOLO) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(SOLO, step))
    bucket.put(f"run/step-0000002/{MARKER_NAME}", b"garbage")
    with Checkpointer(address, group=SOLO) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.latest(verified=True) == 1
    assert "step-0000002: is passed over, because it is not whole" in caplog.text


def test_names_that_can_be_no_part_of_an_address_are_refused_at_once(bucket, tmp_path):
    for options in ({"folder": bucket.text("run")}, {"folder": tmp_path, "mirror": bucket.text("run")}):
        with pytest.raises(CheckpointError, match=r"pattern: must name a part of an address, found 'step#\{step\}'"):
            Checkpointer(options.pop("folder"), pattern="step#{step}", group=SOLO, **options)
