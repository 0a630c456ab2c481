"""Saves one after the other: what is kept, what is busy, what fails, what a program that ends leaves."""

import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpointer.kept import removed_steps
from trackbed import Checkpointer, ShardedTensor, load, open_checkpoint
from trackbed.checkpoint.io.targets import FileTarget
from trackbed.checkpointer import folders as folders_module
from trackbed.checkpointer.folders import LOCK_NAME
from trackbed.checkpointer.steps import steps_to_remove
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.files import publish_folder
from trackbed.files.publish import new_partial


def state_of(group, value, count=3000):
    rows = torch.full((count, 4), float(value))
    return {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, group.rank, group.size)), "step": value}


def value_of(path):
    opened = open_checkpoint(path)
    (value,) = {float(one) for one in opened["rows"][:].unique()} | {float(load(path)["step"])}
    return value


class Gate:
    """Holds the writing of snapshots until it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        write = FileTarget.write

        def held(target, values, poll, **options):
            while not self.opened.wait(0.01):
                poll()
            return write(target, values, poll, **options)

        monkeypatch.setattr(FileTarget, "write", held)


@pytest.fixture
def gate(monkeypatch):
    """Gate that is closed at first."""
    return Gate(monkeypatch)


@pytest.mark.parametrize("size", [1, 3])
def test_steps_are_saved_kept_and_found(size, tmp_path):
    def run(group):
        with Checkpointer(tmp_path / "run", keep_last=2, keep_every=40, keep={10}, group=group) as checkpointer:
            assert checkpointer.latest() is None
            assert checkpointer.load(state_of(group, 0)) is None
            for step in range(0, 80, 10):
                assert checkpointer.save(step, state_of(group, step))
            checkpointer.wait()
            group.barrier()  # rank 0 removes
            assert checkpointer.steps() == [0, 10, 40, 60, 70]
            assert checkpointer.load(state_of(group, 0))["step"] == 70
            assert checkpointer.load(state_of(group, 0), step=40)["rows"].unique().tolist() == [40.0]
            assert [record.error for record in checkpointer.history] == [None] * 8
            assert all(0 < one.blocked_seconds < one.total_seconds for one in checkpointer.history)
        with pytest.raises(CheckpointError, match="must be open, but was closed"):
            checkpointer.save(80, state_of(group, 80))

    run_ranks(size, run)
    names = {f"step-{step:07}" for step in (0, 10, 40, 60, 70)}
    assert {one.name for one in (tmp_path / "run").iterdir()} == {LOCK_NAME, *names}


def test_a_close_with_a_timeout_leaves_what_is_in_flight(tmp_path, gate):
    checkpointer = Checkpointer(tmp_path, group=SOLO)
    checkpointer.save(1, state_of(SOLO, 1))
    for close in (checkpointer.wait, checkpointer.close):
        with pytest.raises(CheckpointError, match=r"save of step 1: must have ended within 0.1 s, but is in flight"):
            close(0.1)
    gate.opened.set()
    checkpointer.close(10)
    checkpointer.close()
    assert value_of(checkpointer.path(1)) == 1


def test_a_load_fills_plain_tensors_where_they_lie(tmp_path):
    state = {**state_of(SOLO, 1), "mean": torch.ones(3), "list": [torch.ones(2), torch.ones(4), 5], "more": 6}
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        mine = {**state_of(SOLO, 0), "mean": torch.zeros(3), "list": [torch.zeros(2), torch.zeros(9)]}
        found = checkpointer.load(mine)
    assert found["mean"] is mine["mean"]
    assert found["list"][0] is mine["list"][0]
    assert found["rows"] is mine["rows"].data
    assert {float(one.sum()) for one in (mine["mean"], mine["list"][0])} == {3.0, 2.0}
    assert found["list"][1].tolist() == [1.0] * 4
    assert mine["list"][1].sum() == 0
    assert (found["list"][2], found["more"], found["step"]) == (5, 6, 1)


def test_a_save_returns_before_anything_is_written(tmp_path, gate):
    def run(group):
        with Checkpointer(tmp_path, group=group) as checkpointer:
            checkpointer.save(1, state_of(group, 1))
            checkpointer.poll()
            assert checkpointer.latest() is None
            assert checkpointer.history[0].total_seconds is None
            group.barrier()
            gate.opened.set()
            checkpointer.wait()
            assert checkpointer.latest() == 1

    run_ranks(2, run)


@pytest.mark.parametrize("on_busy", ["skip", "error", "wait"])
def test_what_a_save_does_while_another_is_in_flight_is_the_same_on_all_ranks(on_busy, tmp_path, gate):
    def run(group):
        with Checkpointer(tmp_path, on_busy=on_busy, group=group) as checkpointer:
            assert checkpointer.save(1, state_of(group, 1))
            if on_busy == "wait":
                gate.opened.set()
                assert checkpointer.save(2, state_of(group, 2))
            elif on_busy == "skip":
                assert not checkpointer.save(2, state_of(group, 2))
            else:
                with pytest.raises(CheckpointError, match="step 2: must be saved after the end"):
                    checkpointer.save(2, state_of(group, 2))
            group.barrier()
            gate.opened.set()
            checkpointer.wait()
            assert checkpointer.steps() == ([1, 2] if on_busy == "wait" else [1])
            assert checkpointer.save(3, state_of(group, 3))

    run_ranks(2, run)
    assert value_of(tmp_path / "step-0000003") == 3


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_is_told_on_all_ranks_and_the_next_save_is_whole(on_failure, who, tmp_path, monkeypatch, caplog):
    write = FileTarget.write
    failures = [who]

    def failing(target, values, poll, **options):
        if target.name.startswith(f"__{who}_") and failures:
            failures.pop()
            raise OSError("the disk is gone")
        return write(target, values, poll, **options)

    monkeypatch.setattr(FileTarget, "write", failing)

    def run(group):
        with Checkpointer(tmp_path, on_failure=on_failure, group=group) as checkpointer:
            checkpointer.save(1, state_of(group, 1))
            text = f"the save of step 1 has failed: save: rank {who}: OSError: the disk is gone"
            if on_failure == "raise":
                with pytest.raises(CheckpointError, match=text):
                    # One rank hears of it before the others.
                    checkpointer.wait() if group.rank else checkpointer.save(2, state_of(group, 2))
                if group.rank:
                    with pytest.raises(CheckpointError, match=text):
                        checkpointer.save(2, state_of(group, 2))
            assert checkpointer.save(2, state_of(group, 2))
            checkpointer.wait()
            assert text.endswith(checkpointer.history[0].error)
            assert checkpointer.steps() == [2]

    with caplog.at_level(logging.WARNING):
        run_ranks(2, run)
    assert len([one for one in caplog.messages if "the disk is gone" in one]) == (2 if on_failure == "warn" else 0)
    assert {one.name for one in tmp_path.iterdir()} == {LOCK_NAME, "step-0000002"}


@pytest.mark.parametrize("phase", ["write", "commit"])
def test_a_thread_that_hangs_is_named_on_all_ranks_and_the_next_save_is_whole(phase, tmp_path, monkeypatch):
    goes_on, hangs = threading.Event(), [1]
    owner = {"write": FileTarget, "commit": folders_module}[phase]
    name = {"write": "write", "commit": "commit_checkpoint"}[phase]
    function, hung_threads = getattr(owner, name), []

    def hang(*arguments, **options):
        is_first_rank = phase == "commit" or arguments[0].name.startswith("__0_")
        if is_first_rank and hangs:
            hangs.pop()
            hung_threads.append(threading.current_thread())
            goes_on.wait()
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, hang)

    def run(group):
        with Checkpointer(tmp_path, group=group) as checkpointer:
            checkpointer.save(1, state_of(group, 1))
            started = time.monotonic()
            own = "its thread has given no sign of life for 2.4 s while it was to " + phase
            with pytest.raises(CheckpointError, match="rank 0 sent no heartbeat" if group.rank else own):
                checkpointer.wait()
            assert time.monotonic() - started < 4
            assert checkpointer.save(2, state_of(group, 2))
            checkpointer.wait()
            group.barrier()
            goes_on.set()
            for thread in hung_threads:
                thread.join(10)
                assert not thread.is_alive() or phase == "commit"
            assert checkpointer.latest() == 2
        return checkpointer.history[0].error

    assert None not in run_ranks(2, run, timeout_seconds=2.0)
    assert value_of(tmp_path / "step-0000002") == 2


def test_after_an_older_step_was_loaded_later_ones_are_set_aside_by_the_first_commit(tmp_path, caplog):
    def run(group):
        with Checkpointer(tmp_path, group=group) as checkpointer:
            for step in (10, 20, 30):
                checkpointer.save(step, state_of(group, step))
            checkpointer.wait()
            checkpointer.load(state_of(group, 0), step=10)
            assert checkpointer.latest() == 30
            checkpointer.save(15, state_of(group, 15))
            checkpointer.wait()
            assert checkpointer.steps() == [10, 15]
            checkpointer.save(20, state_of(group, 21))

    run_ranks(2, run)
    assert value_of(tmp_path / "step-0000020") == 21
    assert value_of(tmp_path / "step-0000020.1.superseded") == 20
    assert "step 10 was loaded, so later checkpoints have other names now" in caplog.text


def test_a_load_while_a_save_is_in_flight_counts_for_the_next_save(tmp_path, gate):
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        gate.opened.set()
        checkpointer.save(10, state_of(SOLO, 10))
        checkpointer.wait()
        gate.opened.clear()
        checkpointer.save(30, state_of(SOLO, 30))
        checkpointer.load(state_of(SOLO, 0), step=10)
        gate.opened.set()
        checkpointer.wait()
        assert checkpointer.steps() == [10, 30]
        checkpointer.save(20, state_of(SOLO, 20))
        checkpointer.wait()
        assert checkpointer.steps() == [10, 20]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_step_is_saved_again_where_folders_cannot_be_exchanged(is_damaged, tmp_path, monkeypatch):
    monkeypatch.setattr(publish_folder._native, "exchange_names", lambda *_: errno.EINVAL)  # as on NFS
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(SOLO, step))
        checkpointer.wait()
        if is_damaged:
            os.truncate(checkpointer.path(2) / "__0_0.distcp", 1000)
        assert checkpointer.latest(verified=True) == (1 if is_damaged else 2)
        checkpointer.save(2, state_of(SOLO, 3))
        checkpointer.wait()
        assert checkpointer.latest(verified=True) == 2
    assert value_of(checkpointer.path(2)) == 3
    assert sorted(one.name for one in tmp_path.iterdir()) == [LOCK_NAME, "step-0000001", "step-0000002"]


def test_a_load_that_is_refused_keeps_no_step(tmp_path):
    with Checkpointer(tmp_path, keep_last=1, group=SOLO) as checkpointer:
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        with pytest.raises(CheckpointError, match="rows"):
            checkpointer.load(state_of(SOLO, 0, count=5), step=1)
        for step in (2, 3):
            checkpointer.save(step, state_of(SOLO, step))
    assert checkpointer.steps() == [3]


def test_a_save_that_fails_sets_nothing_aside(tmp_path, monkeypatch):
    def run(checkpointer):
        for step in (10, 20):
            checkpointer.save(step, state_of(SOLO, step))
        checkpointer.load(state_of(SOLO, 0), step=10)
        checkpointer.wait()

        def fail(*_):
            raise OSError("no room")

        monkeypatch.setattr("trackbed.checkpointer.folders.commit_checkpoint", fail)
        checkpointer.save(15, state_of(SOLO, 15))
        with pytest.raises(CheckpointError, match="no room"):
            checkpointer.wait()
        assert checkpointer.steps() == [10, 20]

    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        run(checkpointer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last: must be None or an integer of at least 1, found 0"),
        ({"keep_every": True}, "keep_every: must be None or an integer of at least 1, found True"),
        ({"on_busy": "later"}, "on_busy: must be 'wait' or 'skip' or 'error', found 'later'"),
        ({"pattern": "step"}, "pattern: must name a folder by the decimal digits of its step"),
        ({"pattern": "{epoch}"}, "pattern: must be like"),
    ],
)
def test_options_are_checked(options, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path, group=SOLO, **options)


def test_ranks_must_agree(tmp_path):
    def run(group):
        with pytest.raises(CheckpointError, match="folder: must be the same on all ranks"):
            Checkpointer(tmp_path / str(group.rank), group=group)
        with pytest.raises(CheckpointError, match="rank 1: ArgumentError: keep_last: must be"):
            Checkpointer(tmp_path, keep_last=group.rank + 1 if group.rank == 0 else 0, group=group)
        checkpointer = Checkpointer(tmp_path, group=group)
        with pytest.raises(CheckpointError, match="step: must be the same on all ranks, but is"):
            checkpointer.save(group.rank, state_of(group, 1))
        with pytest.raises(CheckpointError, match="rank 0: ArgumentError: step must be an integer from 0 to"):
            checkpointer.save(group.rank - 1, state_of(group, 1))
        checkpointer.close()

    run_ranks(2, run)


def test_the_latest_verified_step_is_the_last_one_that_is_whole(tmp_path, caplog):
    def run(group):
        with Checkpointer(tmp_path, group=group) as checkpointer:
            for step in (10, 20, 30, 40):
                checkpointer.save(step, state_of(group, step))
            checkpointer.wait()
            assert checkpointer.latest(verified=True) == 40
            group.barrier()
            if group.rank == 0:
                flip(tmp_path / "step-0000040" / "__0_0.distcp")
                flip(tmp_path / "step-0000030" / "__2_0.distcp")
                (tmp_path / "step-0000020" / ".metadata").write_bytes(b"")
            group.barrier()
            assert checkpointer.latest() == 40
            assert checkpointer.latest(verified=True) == 10
            checkpointer.save(40, state_of(group, 41))
            checkpointer.wait()
            assert checkpointer.latest(verified=True) == 40

    run_ranks(3, run)
    passed_over = [one for one in caplog.messages if "is passed over, because it is not whole" in one]
    assert len(passed_over) == 3
    assert "__2_0.distcp: its checksum must be" in passed_over[1]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_folder_is_kept_by_one_job_at_a_time(tmp_path):
    first = Checkpointer(tmp_path, group=SOLO)
    with pytest.raises(CheckpointError, match="must be kept by one Checkpointer, but one of this process is open"):
        Checkpointer(tmp_path, group=SOLO)
    program = f"import trackbed; trackbed.Checkpointer({str(tmp_path)!r})"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"must be kept by one job, but process {os.getpid()} of " in other.stderr
    first.close()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    Checkpointer(tmp_path, group=SOLO).close()


def test_what_killed_jobs_have_left_is_removed_and_what_others_may_write_is_named(tmp_path, caplog):
    dead = new_partial(tmp_path / "partial.step-0000010")
    dead = dead.with_name(dead.name.replace(f".{os.getpid()}.", ".999999999."))
    living = new_partial(tmp_path / "partial.step-0000020")
    elsewhere = tmp_path / "partial.step-0000030.other-12.34.56.0.partial"
    unlike = tmp_path / dead.name.replace("step-", "epoch-")
    for folder in (dead, living, elsewhere, unlike):
        (folder / "files").mkdir(parents=True)
    Checkpointer(tmp_path, group=SOLO).close()
    assert {one.name for one in tmp_path.iterdir()} == {LOCK_NAME, living.name, elsewhere.name, unlike.name}
    assert caplog.text.count(elsewhere.name) == 1


END = """
import os, signal, sys
import torch
import torch.distributed as dist
import trackbed

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpointer = trackbed.Checkpointer(sys.argv[1])
    checkpointer.save_on_signal(signal.SIGUSR1)
    rows = torch.full((500_000, 4), 1.0)
    state = {"rows": trackbed.ShardedTensor.from_rank_offsets("rows", rows, (0, rank, 2)), "step": 1.0}
    checkpointer.save(1, state)
    rows.zero_()
    dist.destroy_process_group()
    if sys.argv[2] == "raise":
        raise ValueError("training has failed")

main()
"""


@pytest.mark.dist
@pytest.mark.parametrize("how", ["end", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_program_that_ends_waits_for_its_save(how, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(END))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(tmp_path / "run"), how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode == 0) == (how == "end"), ended.stderr
    if how == "end":  # torchrun ends the other rank as soon as one has failed
        assert value_of(tmp_path / "run" / "step-0000001") == 1
    assert "terminate called" not in ended.stderr


def test_loads_while_a_save_is_in_flight(tmp_path, gate):
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        gate.opened.set()
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        gate.opened.clear()
        checkpointer.save(2, state_of(SOLO, 2))
        assert checkpointer.load(state_of(SOLO, 0))["step"] == 1
        gate.opened.set()
    assert load(state_of(SOLO, 0), checkpointer.path(2), group=SOLO)["step"] == 2


@given(
    steps=st.sets(st.integers(0, 60), max_size=12),
    keep_last=st.none() | st.integers(1, 15),
    keep_every=st.none() | st.integers(1, 20),
    keep=st.sets(st.integers(0, 60), max_size=3),
    in_use=st.sets(st.integers(0, 60), max_size=2),
)
def test_retention_removes_what_no_rule_keeps(steps, **rules):
    assert steps_to_remove(steps, **rules) == sorted(removed_steps(steps, **rules))


def test_fewer_checkpoints_than_are_to_be_kept_are_all_kept(tmp_path):
    with Checkpointer(tmp_path, keep_last=5, group=SOLO) as checkpointer:
        for step in range(7):
            checkpointer.save(step, state_of(SOLO, step))
            checkpointer.wait()
            assert checkpointer.steps() == list(range(max(0, step - 4), step + 1))


def test_where_no_checkpoint_is_whole_the_run_begins_anew_and_damaged_ones_are_not_the_newest(tmp_path):
    with Checkpointer(tmp_path, keep_last=2, group=SOLO) as checkpointer:
        for step in (40, 50):
            checkpointer.save(step, state_of(SOLO, step))
    for path in tmp_path.glob("step-*/__0_0.distcp"):
        path.write_bytes(path.read_bytes()[:-1])
    with Checkpointer(tmp_path, keep_last=2, group=SOLO) as checkpointer:
        assert checkpointer.latest(verified=True) is None
        for step in (10, 20, 30):
            checkpointer.save(step, state_of(SOLO, step))
        checkpointer.wait()
        assert checkpointer.steps() == [20, 30]
        assert checkpointer.latest(verified=True) == 30
    assert len(list(tmp_path.glob("*.superseded"))) == 2


def test_all_ranks_find_the_same_steps_once_they_have_closed(tmp_path):
    def run(group):
        with Checkpointer(tmp_path, keep_last=1, group=group) as checkpointer:
            for step in range(20):
                checkpointer.save(step, state_of(group, step))
                checkpointer.wait()
                assert checkpointer.steps() == [step]

    run_ranks(3, run)
