"""Copies of committed checkpoints in a second place, behind the training loop."""

import logging
import random
import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_stores import saves_in, state_of, value_of
from tests.checkpointer.mirrored_rank import TIMEOUT
from tests.support.processes.launching import run_script
from trackbed import Checkpointer
from trackbed.checkpoint import load
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.format.marker import MARKER_NAME
from trackbed.checkpoint.leftovers import find_leftovers
from trackbed.checkpointer import mirror as mirror_module
from trackbed.checkpointer.lease import LEASE_NAME
from trackbed.checkpointer.mirror import REWOUND_NAME
from trackbed.checkpointer.runs import run_in
from trackbed.checkpointer.steps import StepNames
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CheckpointError, StoreError
from trackbed.files.stores import is_address

RANK = Path(__file__).parent / "mirrored_rank.py"


@pytest.fixture(params=["folder", "bucket"])
def mirror(request, tmp_path):
    """A second place, and a function that lists the names in it."""
    if request.param == "folder":
        place = tmp_path / "mirror"
        return str(place), lambda: sorted(one.name for one in place.iterdir() if one.name.startswith("step"))
    bucket = request.getfixturevalue("bucket")

    def names():
        keys = list(bucket.keys())
        data = [key for key in keys if key.startswith("mirror/step") and not key.endswith(MARKER_NAME)]
        return sorted({key.split("/")[1] for key in data})

    return bucket.text("mirror"), names


def wait_until(is_true, seconds=20):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("size", [1, 3])
def test_committed_checkpoints_are_copied_and_kept_by_rules_of_their_own(size, mirror, tmp_path):
    place, names = mirror

    def run(group):
        options = {"keep_last": 1, "mirror": place, "mirror_every": 2, "mirror_keep_last": 3}
        with Checkpointer(tmp_path / "run", group=group, **options) as checkpointer:
            for step in range(9):
                checkpointer.save(step, state_of(group, step))
                checkpointer.wait()
                if step % 2 == 0:
                    wait_until(lambda: checkpointer.history[-1].mirrored_seconds is not None)
            group.barrier()
            assert checkpointer.latest() == 8
            assert checkpointer.steps()[-3:] == [4, 6, 8]
            assert str(checkpointer.path(8)) == str(tmp_path / "run" / "step-0000008")
            assert str(checkpointer.path(4)) == f"{place}/step-0000004"
            assert checkpointer.load(state_of(group, 0), step=4)["copies"].unique().tolist() == [4.0]

    run_ranks(size, run)
    assert names() == [f"step-{step:07}" for step in (4, 6, 8)]
    for step in (4, 6, 8):
        assert value_of(f"{place}/step-{step:07}") == step
    first, second = (
        load({"rows": torch.zeros(10_000 * size, 4)}, f"{where}/step-0000008") for where in (tmp_path / "run", place)
    )
    assert torch.equal(first["rows"], second["rows"])
    assert first["plain"].tolist() == second["plain"].tolist()


def test_what_the_first_place_has_lost_is_loaded_from_the_mirror(mirror, tmp_path, caplog):
    place, _ = mirror
    folder = tmp_path / "run"
    with Checkpointer(folder, group=SOLO, mirror=place) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(SOLO, step))
            checkpointer.wait()
            wait_until(lambda: checkpointer.history[-1].mirrored_seconds is not None)
    data = next((folder / "step-0000002").glob("__0_*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with Checkpointer(folder, group=SOLO, mirror=place) as checkpointer, caplog.at_level(logging.WARNING):
        assert checkpointer.latest(verified=True) == 2
        assert f"step 2 is read from the mirror: {place}/step-0000002" in caplog.messages
        assert checkpointer.load(state_of(SOLO, 0))["step"] == 2
        checkpointer.save(2, state_of(SOLO, 22))
        checkpointer.wait()
        assert str(checkpointer.path(2)) == str(folder / "step-0000002")
    assert value_of(f"{place}/step-0000002") == 22
    shutil.rmtree(folder)
    with Checkpointer(folder, group=SOLO, mirror=place) as checkpointer:
        assert checkpointer.latest() == 2
        assert checkpointer.load(state_of(SOLO, 0))["step"] == 22


def test_a_mirror_that_fails_is_told_and_holds_the_newest_after_it_is_back(
    tmp_path, bucket, proxy, monkeypatch, caplog
):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1")

    def run(group):
        with Checkpointer(tmp_path / "run", group=group, mirror=bucket.text("mirror")) as checkpointer:
            checkpointer.save(1, state_of(group, 1))
            checkpointer.wait()
            wait_until(lambda: checkpointer.history[0].mirrored_seconds is not None)
            group.barrier()
            proxy.faults = [503] * 10_000
            for step in (2, 3):
                checkpointer.save(step, state_of(group, step))
                checkpointer.wait()
            wait_until(lambda: checkpointer.history[2].mirror_error is not None, 40)
            with caplog.at_level(logging.WARNING):
                assert not checkpointer.poll()
            group.barrier()
            proxy.faults = []
            wait_until(lambda: checkpointer.history[2].mirrored_seconds is not None)  # it is tried again
            group.barrier()
            checkpointer.save(4, state_of(group, 4))
            checkpointer.wait()
            wait_until(lambda: checkpointer.history[3].mirrored_seconds is not None)

    run_ranks(2, run)
    assert "step 3 must be copied to the mirror, but: mirror: rank" in caplog.text
    assert value_of(bucket.text("mirror/step-0000004")) == 4
    assert value_of(bucket.text("mirror/step-0000001")) == 1


def test_the_last_checkpoint_is_tried_once_more_at_the_end(tmp_path, bucket, proxy, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1")
    with Checkpointer(tmp_path / "run", group=SOLO, mirror=bucket.text("mirror")) as checkpointer:
        proxy.faults = [503] * 10_000
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        wait_until(lambda: checkpointer.history[0].mirror_error is not None)
        proxy.faults = []
    assert value_of(bucket.text("mirror/step-0000001")) == 1


def test_a_copy_that_fails_while_the_end_is_waited_for_is_tried_once_more(mirror, tmp_path, monkeypatch):
    place, names = mirror
    copy_step, tries = mirror_module.Mirror._copy_step, []

    def fails_late(self, step, meeting):
        tries.append(step)
        if len(tries) == 1:
            wait_until(lambda: self._is_ending)
            raise StoreError("refused")
        copy_step(self, step, meeting)

    monkeypatch.setattr(mirror_module.Mirror, "_copy_step", fails_late)
    with Checkpointer(tmp_path / "run", group=SOLO, mirror=place) as checkpointer:
        checkpointer.save(3, state_of(SOLO, 3))
        checkpointer.wait()
        wait_until(lambda: tries)
    assert tries == [3, 3]
    assert names() == ["step-0000003"]


def test_the_mirror_follows_a_run_that_has_gone_back(mirror, tmp_path):
    place, names = mirror
    folder = tmp_path / "run"
    with Checkpointer(folder, group=SOLO, mirror=place) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(SOLO, step))
            checkpointer.wait()
            wait_until(lambda: checkpointer.history[-1].mirrored_seconds is not None)
        checkpointer.load(state_of(SOLO, 0), step=1)
        checkpointer.save(2, state_of(SOLO, 22))
        checkpointer.wait()
        assert checkpointer.latest() == 2
        wait_until(lambda: checkpointer.history[-1].mirrored_seconds is not None)
        assert checkpointer.steps() == [1, 2]
        assert not (folder / REWOUND_NAME).exists()
    shutil.rmtree(folder)
    with Checkpointer(folder, group=SOLO, mirror=place) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.load(state_of(SOLO, 0))["step"] == 22
    assert names()


def test_places_that_cannot_be_a_mirror_are_refused(tmp_path, bucket):
    (tmp_path / "link").symlink_to(tmp_path)
    for folder, second in (
        (tmp_path, tmp_path),
        (tmp_path, tmp_path / "link"),
        (tmp_path, tmp_path / "step-0000007"),
        (tmp_path / "run", f"{tmp_path}/"),
        (bucket.text("a"), tmp_path),
    ):
        with pytest.raises((ArgumentError, CheckpointError), match="mirror: "):
            Checkpointer(folder, mirror=second, group=SOLO)
    with Checkpointer(tmp_path / "a", mirror=bucket.text("mirror"), group=SOLO):
        with pytest.raises(CheckpointError, match="must be kept by one job"):
            Checkpointer(tmp_path / "b", mirror=bucket.text("mirror"), group=SOLO)
        assert saves_in(bucket, "mirror") <= {LEASE_NAME}


def test_a_job_starts_while_its_mirror_is_down_and_is_as_fast_as_without(tmp_path, bucket, proxy, monkeypatch, caplog):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1")
    proxy.faults = [503] * 10_000
    with Checkpointer(tmp_path / "run", group=SOLO, mirror=bucket.text("mirror")) as checkpointer:
        assert "the mirror must be reachable, and is tried with the first copy" in caplog.text
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        checkpointer.latest()  # asks the mirror, and then not again for a while
        started = time.monotonic()
        assert checkpointer.steps() == [1]
        assert checkpointer.load(state_of(SOLO, 0))["step"] == 1
        assert time.monotonic() - started < 1
        wait_until(lambda: checkpointer.history[0].mirror_error is not None)
        proxy.faults = []
        checkpointer.save(2, state_of(SOLO, 2))
        checkpointer.wait()
        wait_until(lambda: checkpointer.history[1].mirrored_seconds is not None)
    assert value_of(bucket.text("mirror/step-0000002")) == 2


def test_a_close_with_a_timeout_leaves_a_copy_that_is_in_flight(tmp_path, bucket, proxy):
    checkpointer = Checkpointer(tmp_path / "run", group=SOLO, mirror=bucket.text("mirror"))
    proxy.delay_seconds = 0.5
    checkpointer.save(1, state_of(SOLO, 1))
    checkpointer.wait()
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"the copy to the mirror must have ended within 0.3 s, but is in flight"):
        checkpointer.close(0.3)
    assert time.monotonic() - started < 2
    proxy.delay_seconds = 0.0
    checkpointer.close()
    assert value_of(bucket.text("mirror/step-0000001")) == 1


def test_a_run_whose_first_place_is_lost_does_not_begin_anew_while_its_mirror_is_down(
    tmp_path, bucket, proxy, monkeypatch
):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1")
    folder = tmp_path / "run"
    with Checkpointer(folder, group=SOLO, mirror=bucket.text("mirror")) as checkpointer:
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        wait_until(lambda: checkpointer.history[0].mirrored_seconds is not None)
    shutil.rmtree(folder)
    proxy.faults = [503] * 10_000
    with Checkpointer(folder, group=SOLO, mirror=bucket.text("mirror")) as checkpointer:
        with pytest.raises(StoreError, match="the store must answer in time"):
            checkpointer.latest()
        for call in (lambda: checkpointer.latest(verified=True), lambda: checkpointer.load(state_of(SOLO, 0))):
            with pytest.raises(CheckpointError, match="the store must answer in time"):
                call()
        proxy.faults = []
        assert checkpointer.latest(verified=True) is None or checkpointer.latest() == 1


@pytest.mark.slow
def test_a_rank_that_dies_during_a_copy_is_named_and_the_next_job_makes_the_mirror_whole(mirror, tmp_path):
    place, names = mirror
    run = partial(run_script, RANK, 2, tmp_path / "run", place, limit_seconds=60)
    ((found,),) = run("die", gone=1)
    assert found[0].startswith("mirror: ")
    assert re.search(r"\brank 1\b", found[0])
    assert found[1] < 1.2 * TIMEOUT
    assert list(find_damage(f"{place}/step-0000001")) == []
    assert run("whole")[0][0][0] is None
    for step in (1, 3, 4):
        assert list(find_damage(f"{place}/step-{step:07}")) == []
    assert len(names()) in (3, 4)
    if is_address(place):
        assert find_leftovers(place) == []
    else:
        assert [path for path in Path(place).iterdir() if "partial" in path.name] == []


class SlowCommits:
    """Commits of copies that wait until they may go on."""

    def __init__(self, monkeypatch):
        self.begun, self.goes_on = threading.Event(), threading.Event()
        copy = mirror_module.copy_checkpoint

        def copy_slowly(source, target, meeting, commit):
            def commit_later(*arguments):
                self.begun.set()
                self.goes_on.wait(20)
                commit(*arguments)

            copy(source, target, meeting, commit_later)

        monkeypatch.setattr(mirror_module, "copy_checkpoint", copy_slowly)


def test_a_step_that_is_saved_again_while_it_is_copied_is_copied_again(mirror, tmp_path, monkeypatch):
    place, _ = mirror
    slow = SlowCommits(monkeypatch)
    with Checkpointer(tmp_path / "run", group=SOLO, mirror=place) as checkpointer:
        for value in (1, 2):
            checkpointer.save(1, state_of(SOLO, value))
            checkpointer.wait()
            assert slow.begun.wait(20)
        slow.goes_on.set()
        wait_until(lambda: checkpointer.history[1].mirrored_seconds is not None)
    assert value_of(f"{place}/step-0000001") == 2


def test_a_step_of_the_branch_that_was_left_is_not_copied_any_more(mirror, tmp_path, monkeypatch):
    place, _ = mirror
    with Checkpointer(tmp_path / "run", group=SOLO, mirror=place) as checkpointer:
        checkpointer.save(1, state_of(SOLO, 1))
        checkpointer.wait()
        wait_until(lambda: checkpointer.history[0].mirrored_seconds is not None)
        with monkeypatch.context() as patch:
            patch.setattr(mirror_module, "_FIRST_PAUSE", 0.3)
            patch.setattr(mirror_module, "copy_checkpoint", lambda *_: (_ for _ in ()).throw(StoreError("it is down")))
            checkpointer.save(9, state_of(SOLO, 9))
            checkpointer.wait()
            wait_until(lambda: checkpointer.history[1].mirror_error is not None)
        checkpointer.load(state_of(SOLO, 0), step=1)
        commit = checkpointer._run.commit

        def commit_slowly(*arguments):
            time.sleep(1)
            return commit(*arguments)

        monkeypatch.setattr(checkpointer._run, "commit", commit_slowly)
        checkpointer.save(2, state_of(SOLO, 2))
        checkpointer.wait()
        wait_until(lambda: checkpointer.history[2].mirrored_seconds is not None)
        assert checkpointer.steps() == [1, 2]
    with Checkpointer(tmp_path / "run", group=SOLO, mirror=place) as checkpointer:
        assert checkpointer.steps() == [1, 2]


def test_a_step_that_is_to_be_copied_is_not_removed(mirror, tmp_path, monkeypatch):
    place, names = mirror
    options = {"keep_last": 1, "mirror": place, "mirror_every": 10}
    with Checkpointer(tmp_path / "run", group=SOLO, **options) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(mirror_module, "copy_checkpoint", lambda *_: (_ for _ in ()).throw(StoreError("it is down")))
            checkpointer.save(10, state_of(SOLO, 10))
            checkpointer.wait()
            wait_until(lambda: checkpointer.history[0].mirror_error is not None)
        for step in (11, 12):
            checkpointer.save(step, state_of(SOLO, step))
            checkpointer.wait()
        wait_until(lambda: checkpointer.history[0].mirrored_seconds is not None)
        checkpointer.save(13, state_of(SOLO, 13))
        checkpointer.wait()
        assert not (tmp_path / "run" / "step-0000010").exists()
    assert names() == ["step-0000010"]
    assert value_of(f"{place}/step-0000010") == 10


def test_a_close_tries_a_mirror_that_is_down_twice_at_most(tmp_path, bucket, monkeypatch):
    attempts = []

    def fail(*_):
        attempts.append(1)
        time.sleep(0.5)
        raise StoreError("it is down")

    monkeypatch.setattr(mirror_module, "copy_checkpoint", fail)
    checkpointer = Checkpointer(tmp_path / "run", group=SOLO, mirror=bucket.text("mirror"))
    for step in range(10):
        checkpointer.save(step, state_of(SOLO, step))
        checkpointer.wait()
    before = len(attempts)
    checkpointer.close()
    assert len(attempts) <= before + 2


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_after_any_history_the_mirror_has_the_newest_and_nothing_of_branches_that_were_left(
    count, tmp_path, bucket, proxy, monkeypatch, caplog
):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "3")
    caplog.set_level(logging.ERROR)
    for seed in range(count):
        history = MirroredHistory(random.Random(seed), tmp_path / str(seed), bucket.text(f"mirror{seed}"), proxy)
        try:
            history.run()
        finally:
            proxy.faults, proxy.delay_seconds = [], 0.0
        history.check()


class MirroredHistory:
    """A run that saves, goes back, and has a mirror with troubles."""

    def __init__(self, draw, folder, mirror, proxy):
        self.draw, self.folder, self.mirror, self.proxy = draw, folder, mirror, proxy
        self.step = self.serial = 0
        self.values = {}
        """Value of each step of the branch."""
        self.words = []

    def run(self):
        self.proxy.delay_seconds = self.draw.choice([0, 0, 0.01, 0.05])
        with Checkpointer(self.folder, group=SOLO, mirror=self.mirror, on_failure="warn") as checkpointer:
            for _ in range(self.draw.randrange(3, 10)):
                word = self.draw.choice(["save", "save", "save", "load", "again", "wait", "faults"])
                self.words.append(word)
                if word == "wait":
                    time.sleep(self.draw.random())
                elif word == "faults":
                    kinds = [None, None, None, 500, 403, 403, "reset", "lost answer"]
                    self.proxy.faults = [self.draw.choice(kinds) for _ in range(self.draw.randrange(12))]
                elif word == "load" and self.values:
                    checkpointer.wait()
                    self.step = self.draw.choice(sorted(self.values))
                    checkpointer.load(state_of(SOLO, 0), step=self.step)
                    self.values = {step: value for step, value in self.values.items() if step <= self.step}
                elif word in ("save", "again"):
                    self.save(checkpointer, max(self.values) if word == "again" and self.values else None)
            self.save(checkpointer, None)
            checkpointer.wait()
            self.proxy.faults = []

    def save(self, checkpointer, step):
        self.step = self.step + self.draw.choice([1, 1, 2]) if step is None else step
        self.serial += 1
        checkpointer.save(self.step, state_of(SOLO, self.serial))
        self.values[self.step] = self.serial
        if self.draw.random() < 0.7:
            checkpointer.wait()

    def check(self):
        for place in (self.folder, self.mirror):
            steps = run_in(place).steps(StepNames())
            found = {step: value_of(f"{place}/{StepNames().name(step)}") for step in steps}
            assert found.items() <= self.values.items(), (self.words, place)
            assert max(self.values) in found, (self.words, place)
