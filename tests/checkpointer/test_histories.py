"""Histories of saves, failures, ends, restarts and loads of older steps, against a model of what must be there."""

import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpointer.kept import removed_steps
from tests.support import ROOT
from tests.support.stores.servers import FolderPlace
from trackbed import Checkpointer, ShardedTensor, load
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.stored_save import is_given_up
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError
from trackbed.files import publish_folder
from trackbed.files.stores import writes

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}


class Ended(BaseException):
    """The program ends here."""


class Failures:
    """Fails at a numbered operation that changes files: once, or from then on, as if the program had ended."""

    def __init__(self):
        self.left = None
        self.ends = False
        self.has_ended = False
        self.lock = threading.Lock()
        sys.addaudithook(self.look)

    def arm(self, number, *, ends):
        self.left, self.ends, self.has_ended = number, ends, False

    def disarm(self):
        self.left, self.has_ended = None, False

    def look(self, event, arguments):
        if self.left is not None and (event in CHANGES or (event == "open" and is_for_writing(arguments))):
            self.happen()

    def happen(self):
        with self.lock:
            if self.has_ended:
                raise Ended
            if self.left is None:
                return
            self.left -= 1
            if self.left >= 0:
                return
            if self.ends:
                self.left, self.has_ended = 0, True
                raise Ended
            self.left = None
        raise OSError(5, "Input/output error")


def is_for_writing(arguments):
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@pytest.fixture(scope="module")
def failures():
    """The failures of this process; the hook of the system stays."""
    found = Failures()
    exchange = publish_folder._exchange

    def exchange_or_fail(partial, final):
        found.happen() if found.left is not None else None
        exchange(partial, final)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish_folder, "_exchange", exchange_or_fail)
        yield found
    found.disarm()


def state_of(value):
    rows = torch.full((20_000,), float(value))
    return {"rows": ShardedTensor.from_rank_offsets("rows", rows), "value": value}


@pytest.fixture(scope="module")
def failing_requests(failures):
    """The same failures at requests that change a bucket: before the store gets one, or after its answer."""
    run_once = writes._run_once

    def fail_before_or_after(address, request):
        number = failures.left
        if number is None or failures.has_ended or number % 2:
            failures.happen() if number is not None else None
            return run_once(address, request)
        answer = run_once(address, request)
        failures.happen()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writes, "_run_once", fail_before_or_after)
        yield failures


class Run:
    """A run, and what must be in its folder, or at its address."""

    def __init__(self, folder, options):
        self.folder, self.options = folder, options
        self.values = {}
        """Value of each step that is there."""
        self.loaded = None
        self.serial = 0
        self.start()

    def start(self):
        self.checkpointer = Checkpointer(self.folder, group=SOLO, **self.options)
        self.loaded = None
        with pytest.raises(CheckpointError, match=r"must be kept by one (Checkpointer|job)"):
            Checkpointer(self.folder, group=SOLO)

    def restart(self):
        self.checkpointer.close()
        self.start()

    def load_older(self, number):
        steps = self.checkpointer.steps()
        if steps:
            step = steps[number % len(steps)]
            assert self.checkpointer.load(state_of(0), step=step)["value"] == self.values[step]
            self.loaded = step

    def save(self, step, failures, failure=None):
        """Saves; a failure is the number of an operation, and True if the program ends there."""
        self.serial += 1
        before, value = dict(self.values), self.serial
        later = {one for one in before if self.loaded is not None and one > self.loaded and one != step}
        after = (before.keys() - later) | {step}
        removed = removed_steps(after, in_use={step}, **self.options)
        if failure is not None:
            failures.arm(failure[0], ends=failure[1])
        try:
            self.checkpointer.save(step, state_of(value))
            self.checkpointer.wait()
        except (CheckpointError, Ended):
            error = True
        else:
            error = False
        fired = failure is not None and (failures.left is None or failures.has_ended)
        failures.disarm()
        found = set(self.checkpointer.steps())
        if not fired:
            assert not error
            assert found == after - removed
        # Nothing else is lost, and nothing is removed unless the new checkpoint is there.
        self.values = {one: value_of(self.checkpointer.path(one)) for one in found}
        is_there = self.values.get(step) == value
        assert is_there or error
        missing = before.keys() - found
        assert missing <= later | (removed if is_there else set()), (missing, later, removed)
        if error and not failure[1]:
            # One operation has failed; others made good what had been done, unless it failed in doing that.
            assert is_there or missing == set()
        for one in found:
            assert self.values[one] in (before.get(one), value if one == step else None)
        assert self.checkpointer.latest(verified=True) == max(found, default=None)
        if is_there and not (error and later & found):
            self.loaded = None
        if failure is not None and failure[1] and fired:
            self.restart()


def value_of(path):
    return load(path, group=SOLO)["value"]


steps = st.integers(0, 12).map(lambda number: 10 * number)
actions = st.one_of(
    st.tuples(st.just("save"), steps),
    st.tuples(st.just("fail"), steps, st.integers(0, 30), st.booleans()),
    st.tuples(st.just("load"), st.integers(0, 10)),
    st.tuples(st.just("restart")),
)


OPTIONS = st.fixed_dictionaries(
    {"keep_last": st.sampled_from([None, 1, 2, 3])}, optional={"keep_every": st.sampled_from([20, 30])}
)
HISTORIES = st.lists(actions, min_size=1, max_size=10)


def check(history, options, folder, failures):
    logging.disable(logging.WARNING)
    run = Run(folder, options)
    try:
        for kind, *arguments in history:
            if kind == "save":
                run.save(arguments[0], failures)
            elif kind == "fail":
                run.save(arguments[0], failures, tuple(arguments[1:]))
            elif kind == "load":
                run.load_older(*arguments)
            else:
                run.restart()
    finally:
        logging.disable(logging.NOTSET)
        failures.disarm()
        run.checkpointer.close()


@settings(max_examples=min(settings().max_examples, 1000))
@given(options=OPTIONS, history=HISTORIES)
def test_any_history_keeps_what_must_be_kept(failures, tmp_path_factory, options, history):
    check(history, options, tmp_path_factory.mktemp("run"), failures)


@settings(max_examples=5 if settings().max_examples < 100 else 150)
@given(options=OPTIONS, history=HISTORIES)
def test_any_history_at_an_address_keeps_what_must_be_kept(any_bucket, failing_requests, options, history):
    address = any_bucket.text(uuid.uuid4().hex)
    check(history, options, address, failing_requests)
    assert all(is_given_up(one) for one in unfinished_in(address))


def unfinished_in(address):
    """Saves that the markers name as unfinished."""
    names = StoredFolder(address).folders()
    markers = [StoredFolder(f"{address}/{name}").marker() for name in names]
    return [one for marker in markers if marker is not None for one in marker.unfinished]


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_jobs_that_are_killed_leave_what_the_model_allows(count, place, tmp_path):
    count = count if isinstance(place, FolderPlace) else count // 2
    script = Path(__file__).parent / "killed_jobs.py"
    reports = tmp_path / "reports"
    reports.mkdir()
    command = [sys.executable, "-W", "ignore", str(script), place.text("run"), str(reports), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=20 + 5 * count, check=False
    )
    assert found.returncode == 0, found.stderr
    problems, left = json.loads(found.stdout)
    assert problems == []
    assert left == []
