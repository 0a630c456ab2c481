"""Calls from where they must not come, options that cannot be right, and forked processes."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from tests.checkpointer.test_checkpointer import Gate, state_of, value_of
from tests.support import ROOT
from tests.support.tiers import slow_but
from trackbed import Checkpointer, ShardedTensor
from trackbed.checkpointer.folders import LOCK_NAME
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CheckpointError


@pytest.fixture
def gate(monkeypatch):
    """Gate for the writing of snapshots that is closed at first."""
    return Gate(monkeypatch)


FORKS = """
    import multiprocessing, os, sys, time
    import torch
    from trackbed import Checkpointer, ShardedTensor
    from trackbed.errors import CheckpointError

    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()

    def use():
        step()  # waits for no copies of the parent
        with checkpointer.lock():
            pass
        try:
            checkpointer.save(2, {"step": 2})
        except CheckpointError as error:
            assert "must be used by the process that has made it" in str(error), error
        else:
            raise SystemExit(4)
        checkpointer.close()

    with Checkpointer(sys.argv[1], snapshot="deferred", writer=sys.argv[2]) as checkpointer:
        step()
        from trackbed import sharded_state
        checkpointer.save(1, {"model": model, "step": 1})
        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # what ends a program ends this process, too
        child.join(20)
        assert child.exitcode == 0, child.exitcode
        for _ in range(200):
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(0.1)
        else:
            raise SystemExit("a forked process does not end")
        loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
        started = time.monotonic()
        assert len(list(loader)) == 8
        del loader
        assert time.monotonic() - started < 4
        checkpointer.wait()
    print(checkpointer.steps())
"""


@pytest.mark.parametrize("writer", slow_but(["thread"], ["thread", "process"]))
def test_forked_processes_wait_for_no_thread_and_save_nothing(writer, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKS), str(tmp_path), writer]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[1]"


def test_one_thread_at_a_time_makes_calls(tmp_path, gate):
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        checkpointer.save(1, state_of(SOLO, 1))
        waiting = threading.Thread(target=checkpointer.save, args=(2, state_of(SOLO, 2)))
        waiting.start()
        time.sleep(0.2)
        with pytest.raises(CheckpointError, match="must be called by one thread at a time"):
            checkpointer.save(3, state_of(SOLO, 3))
        gate.opened.set()
        waiting.join()
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]
    assert [value_of(checkpointer.path(step)) for step in (1, 2)] == [1, 2]


@pytest.mark.parametrize("call", ["wait", "close", "poll", "save"])
def test_calls_from_within_a_save_are_refused(call, tmp_path, caplog):
    errors = []

    def observe(name, _):
        arguments = (9, {"step": 9}) if call == "save" else ()
        try:
            getattr(checkpointer, call)(*arguments)
        except CheckpointError as error:
            errors.append((name, str(error)))
            raise

    checkpointer = Checkpointer(tmp_path, observe=observe, group=SOLO)
    checkpointer.save(1, state_of(SOLO, 1))
    checkpointer.wait()
    checkpointer.close()
    assert value_of(checkpointer.path(1)) == 1
    assert {name for name, _ in errors} >= {"describe", "copy", "write", "commit"}
    assert all("must not be called from `observe`" in text for _, text in errors)
    assert "observe must raise nothing, but has" in caplog.text


@pytest.mark.parametrize(
    "pattern",
    ["step-{step:x}", "step-{step:e}", "step-{step:,}", "{step:.3g}", "a\0{step}", "{step:0200d}", 5, None, "{step}/a"],
)
def test_patterns_that_cannot_be_read_back_are_refused(pattern, tmp_path):
    with pytest.raises(CheckpointError, match="pattern: must"):
        Checkpointer(tmp_path / "run", pattern=pattern, group=SOLO)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pattern", ["iter_{step:07d}", "{step}", "a1-{step}-b2"])
def test_other_patterns_are_read_back(pattern, tmp_path):
    with Checkpointer(tmp_path, pattern=pattern, group=SOLO) as checkpointer:
        checkpointer.save(1234567890, {"step": 1})
    assert checkpointer.steps() == [1234567890]


@pytest.mark.parametrize("keep", [None, 3, "12", iter([1])])
def test_what_is_to_be_kept_is_checked_at_once(keep, tmp_path):
    with pytest.raises(CheckpointError, match="keep: must be a set of steps, or a function"):
        Checkpointer(tmp_path, keep=keep, keep_last=1, group=SOLO)


def test_a_function_that_fails_for_an_older_step_fails_no_save(tmp_path, caplog):
    def keep(step):
        if step == 1:
            raise KeyError(step)
        return False

    with Checkpointer(tmp_path, keep_last=1, group=SOLO) as checkpointer:
        checkpointer.save(1, {"step": 1})
    with Checkpointer(tmp_path, keep=keep, keep_last=1, group=SOLO) as checkpointer:
        for step in (2, 3):
            checkpointer.save(step, {"step": step})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
    assert "earlier checkpoints must be removed, but keep raises" in caplog.text


@pytest.mark.parametrize("what", slow_but(["copy"], ["copy", "remove"]))
def test_a_lock_that_the_process_has_lost_is_taken_again(what, tmp_path):
    folder = tmp_path / "run"
    program = f"from trackbed import Checkpointer; Checkpointer({str(folder)!r}).close()"

    def second_job():
        command = [sys.executable, "-W", "ignore", "-c", program]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return "must be kept by one job" in found.stderr

    with Checkpointer(folder, group=SOLO) as checkpointer:
        assert second_job()
        if what == "copy":
            shutil.copytree(folder, tmp_path / "copy")  # which closes a descriptor of the lock
        else:
            shutil.rmtree(folder)
            folder.mkdir()
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        assert second_job()
    assert not second_job()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="OSError"):
        Checkpointer(tmp_path / "run", group=SOLO)
    assert (tmp_path / "precious").read_text() == "text"


def test_a_checkpointer_that_is_dropped_gives_the_folder_back(tmp_path):
    checkpointer = Checkpointer(tmp_path, group=SOLO)
    checkpointer.save(1, {"step": 1})
    checkpointer.wait()
    del checkpointer
    gc.collect()
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        assert checkpointer.latest() == 1


@pytest.mark.parametrize("signals", [(signal.SIGKILL,), (signal.SIGUSR2, "x"), (signal.SIGUSR2, 999)])
def test_signals_that_one_rank_cannot_handle_leave_no_handlers(signals, tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        with pytest.raises(CheckpointError, match="signals: must be"):
            checkpointer.save_on_signal(*signals)
        assert signal.getsignal(signal.SIGUSR2) == before
        checkpointer.save_on_signal(signal.SIGUSR2)
        closing = threading.Thread(target=checkpointer.close)
        closing.start()
        closing.join()
    signal.signal(signal.SIGUSR2, before)
    Checkpointer(tmp_path, group=SOLO).close()


@pytest.mark.parametrize("step", [True, -1, "x", 1.0, [1], 1 << 64])
def test_steps_are_checked_before_a_load(step, tmp_path):
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        for call in (lambda: checkpointer.load({}, step=step), lambda: checkpointer.save(step, {})):
            with pytest.raises(CheckpointError, match="step must be an integer from 0 to"):
                call()


@pytest.mark.parametrize("seconds", [float("nan"), -1, "x", True])
def test_timeouts_are_checked(seconds, tmp_path):
    checkpointer = Checkpointer(tmp_path, group=SOLO)
    for call in (checkpointer.wait, checkpointer.close):
        with pytest.raises(ArgumentError, match="timeout_seconds: must be None or a number"):
            call(seconds)
    checkpointer.close()


def test_ranks_at_different_operations_are_told(tmp_path):
    def run(group):
        checkpointer = Checkpointer(tmp_path, group=group)
        with pytest.raises(CheckpointError, match=r"must (save|load) at the same time|is at"):
            checkpointer.save(1, state_of(group, 1)) if group.rank else checkpointer.load({})

    run_ranks(2, run)


@pytest.mark.parametrize("ends_with_a_step", [True, False])
def test_a_change_that_is_counted_after_the_copy_is_an_error_all_the_same(ends_with_a_step, tmp_path, gate):
    """An operation of torch counts a change once it has written: a copy beside it may have parts of both."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    with Checkpointer(tmp_path, snapshot="deferred", group=SOLO) as checkpointer:
        optimizer.step()
        checkpointer.save(1, {"weight": ShardedTensor.from_rank_offsets("weight", model.weight)})
        later = checkpointer._writer._snapshot.later
        assert later._versions
        assert later._is_over.wait(20)  # it is copied, and not written
        with torch.no_grad():
            model.weight.mul_(2)
        if ends_with_a_step:
            optimizer.step()
        gate.opened.set()
        with pytest.raises(CheckpointError, match="must be changed by steps of optimizers alone"):
            checkpointer.wait()
        assert checkpointer.steps() == []
        checkpointer.save(2, {"weight": ShardedTensor.from_rank_offsets("weight", model.weight)})
        optimizer.step()
        checkpointer.wait()
        assert checkpointer.steps() == [2]


def test_a_load_of_the_newest_while_a_save_is_in_flight_is_not_going_back(tmp_path, gate):
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        gate.opened.set()
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        gate.opened.clear()
        checkpointer.save(2, state_of(SOLO, 2))
        assert checkpointer.load(state_of(SOLO, 0))["step"] == 1
        gate.opened.set()
        checkpointer.save(3, state_of(SOLO, 3))
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]


def test_what_is_loaded_is_not_removed_meanwhile(tmp_path):
    with Checkpointer(tmp_path, keep_last=1, group=SOLO) as checkpointer:
        for step in range(30):
            checkpointer.save(step, state_of(SOLO, step))
            if step:
                found = checkpointer.load(state_of(SOLO, 0))
                assert found["step"] in (step - 1, step)


THREADS = """
    import sys, threading, time
    from trackbed import Checkpointer

    def train():
        checkpointer = Checkpointer(sys.argv[1])
        for step in range(3):
            time.sleep(0.3)
            checkpointer.save(step, {"step": step})

    threading.Thread(target=train).start()
"""


def test_a_thread_that_trains_on_after_the_main_thread_may_save(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(THREADS), str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    with Checkpointer(tmp_path, group=SOLO) as checkpointer:
        assert checkpointer.steps() == [0, 1, 2]
