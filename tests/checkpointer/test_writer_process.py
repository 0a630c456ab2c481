"""A process beside each rank that writes: killed, stopped, failing, left alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.checkpointer.test_checkpointer import state_of, value_of
from tests.support.tiers import slow_but
from trackbed import Checkpointer
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError


@pytest.fixture
def checkpointer(tmp_path):
    """Checkpointer of one process, whose writer has written once."""
    with Checkpointer(tmp_path, writer="process", group=SOLO, on_failure="raise") as checkpointer:
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        yield checkpointer


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def partials(folder):
    return [one for one in folder.iterdir() if "partial" in one.name]


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_process_writes_is_whole_and_it_ends_with_the_checkpointer(tmp_path):
    def run(group):
        with Checkpointer(tmp_path, writer="process", group=group) as checkpointer:
            # Memory of several sizes, none for a moment, and an object.
            for step, count in enumerate([100, 3000, 50_000, 7], start=1):
                state = state_of(group, step, count)
                state["empty"] = torch.zeros(0)
                checkpointer.save(step, state)
                state["rows"].data.fill_(-1)
                checkpointer.wait()
                assert value_of(checkpointer.path(step)) == step
            return checkpointer._writer.process.pid

    pids = run_ranks(2, run)
    assert len(set(pids)) == 2
    assert not any(map(is_there, pids))


@pytest.mark.parametrize("how", ["killed", "failing"])
def test_a_writer_that_fails_is_named_and_the_next_save_is_whole(how, checkpointer, tmp_path):
    pid = checkpointer._writer.process.pid
    os.kill(pid, signal.SIGSTOP)
    checkpointer.save(2, state_of(SOLO, 2))
    wait_for(lambda: partials(tmp_path))
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
        message = f"save of step 2 has failed: save: .*writer process {pid}: must write, but was ended by signal 9"
    else:
        time.sleep(0.3)  # the thread has looked at the folder, and waits for the process
        partials(tmp_path)[0].rmdir()
        os.kill(pid, signal.SIGCONT)
        message = f"save of step 2 has failed: save: .*writer process {pid}: FileNotFoundError: "
    with pytest.raises(CheckpointError, match=message):
        checkpointer.wait()
    assert partials(tmp_path) == []
    assert checkpointer.latest() == 1
    checkpointer.save(3, state_of(SOLO, 3))
    checkpointer.wait()
    assert value_of(checkpointer.path(3)) == 3
    assert (checkpointer._writer.process.pid == pid) == (how == "failing")


@pytest.mark.slow
def test_a_writer_that_is_stopped_is_given_up(checkpointer, tmp_path):
    pid = checkpointer._writer.process.pid
    checkpointer._writer.process._silent_seconds = 1.0
    os.kill(pid, signal.SIGSTOP)
    checkpointer.save(2, state_of(SOLO, 2))
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="must write, but has given no sign of life for 1 s"):
        checkpointer.wait()
    assert time.monotonic() - started < 10
    assert not is_there(pid)
    checkpointer._writer.process._silent_seconds = 60.0
    checkpointer.save(3, state_of(SOLO, 3))
    checkpointer.wait()
    assert value_of(checkpointer.path(3)) == 3
    assert partials(tmp_path) == []


@pytest.mark.slow
def test_a_failure_of_another_rank_ends_the_work_of_the_process(tmp_path, monkeypatch):
    asked = threading.Event()

    def fail(*_, **__):
        assert asked.wait(20)  # otherwise rank 1 may hear of the failure before it asks its process
        raise ZeroDivisionError

    def run(group):
        with Checkpointer(tmp_path, writer="process", group=group) as checkpointer:
            checkpointer.save(1, state_of(group, 1))
            checkpointer.wait()
            pid = checkpointer._writer.process.pid
            if group.rank:
                os.kill(pid, signal.SIGSTOP)
            group.barrier()
            process = checkpointer._writer.process
            if group.rank == 0:
                monkeypatch.setattr(process, "write", fail)
            else:
                answer = process._answer
                monkeypatch.setattr(process, "_answer", lambda *arguments: asked.set() or answer(*arguments))
            checkpointer.save(2, state_of(group, 2))
            if group.rank:
                wait_for(lambda: checkpointer.history[-1].total_seconds is not None or not is_there(pid))
            with pytest.raises(CheckpointError, match="rank 0: ZeroDivisionError"):
                checkpointer.wait()
            monkeypatch.undo()
            checkpointer.save(3, state_of(group, 3))

    run_ranks(2, run)
    assert value_of(tmp_path / "step-0000003") == 3


PROGRAM = """
import os, signal, sys, torch, trackbed
checkpointer = trackbed.Checkpointer(sys.argv[1], writer="process")
rows = torch.full((3_000_000, 4), 1.0)
checkpointer.save(1, {"rows": trackbed.ShardedTensor.from_rank_offsets("rows", rows), "step": 1.0})
print(checkpointer._writer.process.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", pytest.param("ends", marks=pytest.mark.slow)])
def test_a_writer_ends_with_its_program_and_commits_nothing_afterwards(how, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    pid = int(ended.stdout)
    wait_for(lambda: not is_there(pid))
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        assert checkpointer.steps() == ([] if how == "killed" else [1])
    assert partials(tmp_path) == []


def test_memory_that_is_replaced_by_other_memory_of_the_same_size_is_mapped_again(checkpointer):
    slab = checkpointer._writer._slab
    num_bytes = slab.num_bytes
    slab.release()
    checkpointer.save(2, state_of(SOLO, 2))
    checkpointer.wait()
    assert slab.num_bytes == num_bytes
    assert value_of(checkpointer.path(2)) == 2


@pytest.mark.parametrize("number", slow_but([signal.SIGINT], [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
def test_signals_to_all_processes_of_a_job_do_not_end_the_writer(number, checkpointer):
    pid = checkpointer._writer.process.pid
    for step in (2, 3):
        os.kill(pid, number)
        checkpointer.save(step, state_of(SOLO, step))
        checkpointer.wait()
        assert value_of(checkpointer.path(step)) == step
    assert checkpointer._writer.process.pid == pid


def test_a_module_of_the_working_directory_is_not_taken_for_another(tmp_path, monkeypatch):
    (tmp_path / "inspect.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with Checkpointer(tmp_path / "run", writer="process", group=SOLO) as checkpointer:
        checkpointer.save(1, state_of(SOLO, 1))
    assert value_of(tmp_path / "run" / "step-0000001") == 1
