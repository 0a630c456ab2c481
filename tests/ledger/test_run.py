"""Runs and their record."""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import trackbed
from tests.ledger.run_rank import GLOBAL_BATCH, losses_of, train
from tests.support.processes.launching import run_script
from tests.support.tiers import slow_but
from trackbed.cli.main import trackbed as trackbed_command
from trackbed.errors import ArgumentError, BlendFileError, FormatError, RunError
from trackbed.ledger import read_run
from trackbed.loading import provenance

RANK = Path(__file__).parent / "run_rank.py"


@pytest.fixture
def open_run(folder, tmp_path):
    blend = folder / "blend.toml"
    return lambda folder=tmp_path / "run", **options: trackbed.open_run(folder, blend=blend, **options)


def expected(folder, steps):
    """Hash and loss of each step, of the samples as the dataset has them."""
    dataset = trackbed.open_blend(folder / "blend.toml").train
    found = []
    for step in range(steps):
        samples = [dataset[position] for position in range(GLOBAL_BATCH * step, GLOBAL_BATCH * (step + 1))]
        digests = [hashlib.sha256(sample["tokens"].numpy().astype("<i8").tobytes()).digest() for sample in samples]
        batch = {"tokens": torch.stack([sample["tokens"] for sample in samples])}
        found.append((hashlib.sha256(b"".join(digests)).hexdigest(), losses_of(batch).mean().item()))
    return found


def hashes_and_losses(record):
    return [(line["batch_hash"], pytest.approx(line["loss"])) for line in record.steps]


def test_each_step_has_a_line(folder, tmp_path, open_run):
    with open_run() as run:
        train(run, 5)
        run.event("evaluation", split="valid", loss=2.5)
        state = run.state_dict()
    record = read_run(tmp_path / "run")
    assert hashes_and_losses(record) == expected(folder, 5)
    assert [(line["step"], line["first_sample"]) for line in record.steps] == [(1 + k, 8 * k) for k in range(5)]
    assert {(line["num_samples"], line["num_ranks"], line["grad_norm"]) for line in record.steps} == {(8, 1, 0.5)}
    assert all(sum(tokens for tokens, _ in line["datasets"].values()) == 8 * 16 for line in record.steps)
    assert [event["event"] for event in record.events] == ["open", "begin", "evaluation", "close"]
    assert (record.events[2]["step"], state["step"]) == (5, 5)
    assert (tmp_path / "run" / record.events[0]["blend"]).read_bytes() == (folder / "blend.toml").read_bytes()


@pytest.mark.parametrize("name", ["steps.jsonl", "events.jsonl"])
def test_a_folder_with_files_of_others_is_refused_and_stays_as_it_is(tmp_path, open_run, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("notes of someone")
    with pytest.raises(FormatError, match=f"{name}: must have lines of JSON objects"):
        open_run()
    assert (tmp_path / "run" / name).read_text() == "notes of someone"
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {name, ".run.lock"}


def test_steps_behind_the_position_that_a_run_goes_on_from_are_superseded(folder, tmp_path, open_run):
    with open_run() as run:
        train(run, 3)
        state = json.loads(json.dumps(run.state_dict()))
    with open_run() as run:
        run.load_state_dict(state)
        train(run, 2)
    with open_run() as run:
        run.load_state_dict(state)
        train(run, 4)
        assert run.step == 7
    record = read_run(tmp_path / "run")
    assert hashes_and_losses(record) == expected(folder, 7)
    assert [line["step"] for line in record.superseded] == [4, 5]


def test_a_state_can_be_loaded_before_and_after_the_loader_is_made(folder, tmp_path, open_run):
    with open_run() as run:
        train(run, 2)
        state = run.state_dict()
        loader = run._loader
        next(iter(loader))  # a batch that no step has
        run.load_state_dict(state)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        run.record(1.5)
    record = read_run(tmp_path / "run")
    assert [line["batch_hash"] for line in record.steps] == [one for one, _ in expected(folder, 3)]
    assert record.steps[2]["loss"] == 1.5


def test_each_version_of_the_blend_file_is_kept_once(folder, tmp_path):
    blend = tmp_path / "blend.toml"
    text = (folder / "blend.toml").read_text().replace('"a"', f'"{folder}/a"').replace('"b"', f'"{folder}/b"')
    for content in (text, text, text.replace("weight = 3", "weight = 2"), text):
        blend.write_text(content)
        trackbed.open_run(tmp_path / "run", blend=blend).close()
    used = [event["blend"] for event in read_run(tmp_path / "run").events if event["event"] == "open"]
    assert used == ["blends/1.toml", "blends/1.toml", "blends/2.toml", "blends/1.toml"]


def test_a_run_is_open_in_one_job_at_a_time(open_run):
    with open_run(), pytest.raises(RunError, match=r"run: must be the run of one job, but this process has it open"):
        open_run()
    open_run().close()


def test_wrong_uses_are_refused(folder, tmp_path, open_run):
    with pytest.raises(OSError, match="gone"):
        trackbed.open_run(tmp_path / "run", blend=folder / "gone.toml")
    (tmp_path / "bad.toml").write_text("version = 2\n")
    with pytest.raises(BlendFileError):
        trackbed.open_run(tmp_path / "run", blend=tmp_path / "bad.toml")
    assert not (tmp_path / "run").exists()
    with open_run() as run:
        with pytest.raises(ArgumentError, match=r"a step can be recorded after Run.loader"):
            run.record(1.0)
        batches = iter(run.loader(batch_size=4))
        with pytest.raises(ArgumentError, match="a run must have one loader"):
            run.loader(batch_size=4)
        next(batches)
        with pytest.raises(ArgumentError, match=r"loss must be one number, or one for each of 4 samples, found 3"):
            run.record(torch.zeros(3))
        for state in (None, {}, {"version": 1}, {"version": 1, "step": -1, "loader": None}):
            with pytest.raises(ArgumentError):
                run.load_state_dict(state)
    with pytest.raises(ArgumentError, match="the run must be open, found it is closed"):
        run.record(1.0)
    run.close()


def test_a_state_of_other_data_is_refused(folder, tmp_path, open_run):
    text = (folder / "blend.toml").read_text().replace('"instant"', '"megatron"')
    (folder / "first.toml").write_text(text)
    (folder / "other.toml").write_text(text.replace("weight = 3", "weight = 2"))
    with trackbed.open_run(tmp_path / "run", blend=folder / "first.toml", cache=tmp_path / "cache") as run:
        train(run, 1)
        state = run.state_dict()
    with trackbed.open_run(tmp_path / "other", blend=folder / "other.toml", cache=tmp_path / "cache") as run:
        run.load_state_dict(state)
        with pytest.raises(ArgumentError, match="a run can resume only with"):
            run.loader(batch_size=2)


def test_an_observer_that_takes_long_does_not_hold_training(open_run):
    released = threading.Event()

    class Observer:
        def on_step(self, line):
            released.wait(20)

        def on_event(self, event):
            pass

        def close(self):
            pass

    with open_run(observers=[Observer()]) as run:
        started = time.monotonic()
        train(run, 8)
        run.flush()
        assert time.monotonic() - started < 10
        released.set()


def test_an_observer_is_told_and_one_that_fails_is_not_told_again(open_run, caplog):
    class Observer:
        def __init__(self, fails):
            self.fails, self.told = fails, []

        def on_step(self, line):
            self.told.append(line["step"])
            if self.fails:
                raise ConnectionError("no network")

        def on_event(self, event):
            self.told.append(event["event"])

        def close(self):
            self.told.append("closed")

    good, bad = Observer(fails=False), Observer(fails=True)
    with caplog.at_level(logging.ERROR), open_run(observers=[bad, good]) as run:
        train(run, 2)
        run.flush()
    deadline = time.monotonic() + 10
    while "closed" not in good.told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert good.told == ["open", "begin", 1, 2, "close", "closed"]
    assert bad.told == ["open", "begin", 1]
    assert "has failed, and is told no more of the run" in caplog.text


def test_an_error_of_the_thread_is_raised_by_the_next_call(open_run):
    run = open_run()
    train(run, 1)
    run._recorder.call(lambda files: {}["missing"])
    with pytest.raises(KeyError):
        run.flush()
    with pytest.raises(KeyError):
        run.close()
    open_run().close()


@pytest.mark.dist
@pytest.mark.parametrize("jobs", slow_but([[(2, 4), (1, 3)]], [[(2, 4), (1, 3)], [(2, 3), (1, 2), (4, 2)]]))
def test_ranks_write_the_lines_that_one_rank_writes_and_go_on_on_others(folder, tmp_path, open_run, jobs):
    saved = tmp_path / "state"
    for size, steps in jobs:
        states = run_script(RANK, size, folder, tmp_path / "run", steps, saved, limit_seconds=60)
        assert all(state == states[0] for state in states)
    record = read_run(tmp_path / "run")
    assert hashes_and_losses(record) == expected(folder, 7)
    assert [line["num_ranks"] for line in record.steps] == [size for size, steps in jobs for _ in range(steps)]
    with open_run(folder=tmp_path / "alone") as run:
        train(run, 7)
    assert [line["loss"] for line in read_run(tmp_path / "alone").steps] == [line["loss"] for line in record.steps]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "rank"), slow_but([("blend", 1)], [(fault, rank) for fault in ("folder", "blend") for rank in (0, 1)])
)
def test_a_rank_that_fails_ends_the_opening_of_all(folder, tmp_path, fault, rank):
    run_script(
        RANK, 2, folder, tmp_path / "run", 2, "-", fault, rank, limit_seconds=60, expected_status=1, parses=False
    )
    assert not list((tmp_path).glob("run*/steps.jsonl")) or not read_run(tmp_path / "run").steps


@pytest.mark.dist
@pytest.mark.parametrize("rank", slow_but([0], [0, 1]))
def test_a_rank_that_ends_without_recording_ends_the_others(folder, tmp_path, rank):
    arguments = (folder, tmp_path / "run", 3, "-", "record", rank)
    run_script(RANK, 2, *arguments, limit_seconds=60, gone=rank, expected_status=1, parses=False)
    assert read_run(tmp_path / "run").steps == []


def test_the_command_shows_what_a_step_was_fed(folder, tmp_path, open_run):
    with open_run() as run:
        train(run, 3)
    call = partial(CliRunner().invoke, trackbed_command)
    words = ["show", "--run", str(tmp_path / "run"), "--step"]
    found = json.loads(call([*words, "2", "--json"]).stdout)
    splits = trackbed.open_blend(folder / "blend.toml")
    wanted = [asdict(provenance(splits.train, position)) for position in range(8, 16)]
    for sample in found["samples"]:
        for origin in sample["origins"]:
            del origin["text"]
    assert found == {"step": 2, "samples": json.loads(json.dumps(wanted))}
    assert call([*words, "2", "--rank", "0"]).stdout.count("\nits sample ") == 8
    for more, words_of_error in (
        (["4"], "step must be one that is recorded, found 4 and steps 1 to 3"),
        (["2", "--rank", "1"], "--rank must be in [0, 1), the ranks of step 2, found 1"),
    ):
        failed = call([*words, *more])
        assert (failed.exit_code, words_of_error in failed.stderr) == (1, True)
    assert call(["show", "--run", str(tmp_path / "run")]).exit_code == 2
    assert call(["show", "--step", "2", str(folder / "blend.toml")]).exit_code == 2
    assert "must be the folder of a run" in call(["show", "--run", str(tmp_path), "--step", "1"]).stderr


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        ("begin", {}, "kind must be a name other than open, begin, blend, refused, close, found 'begin'"),
        ("close", {}, "kind must be a name other than"),
        ("", {}, "kind must be a name other than"),
        (5, {}, "kind must be a name other than"),
        ("lunch", {"time": 1}, "event 'lunch': fields must have names of their own, found time"),
        ("lunch", {"step": 1}, "event 'lunch': fields must have names of their own, found step"),
        ("lunch", {"menu": object()}, "event 'lunch': fields must be values that JSON has"),
    ],
)
def test_events_that_would_spoil_the_record_are_refused(tmp_path, open_run, kind, fields, problem):
    with open_run() as run:
        train(run, 2)
        with pytest.raises(ArgumentError, match=problem):
            run.event(kind, **fields)
    assert len(read_run(tmp_path / "run").steps) == 2


def test_steps_that_would_spoil_the_record_are_refused_and_lose_no_batch(tmp_path, open_run):
    with open_run() as run:
        batches = iter(run.loader(batch_size=GLOBAL_BATCH))
        with pytest.raises(ArgumentError, match="step 1 must have read a batch before it is recorded, found none"):
            run.record(0.5)
        next(batches)
        with pytest.raises(ArgumentError, match="one for each of 8 samples, found 3"):
            run.record([0.5] * 3)
        with pytest.raises(ArgumentError, match="further values must have names of their own, found batch_hash, step"):
            run.record(0.5, step=3, batch_hash="zz")
        run.record(0.5, lr=0.1)
    (line,) = read_run(tmp_path / "run").steps
    assert (line["step"], line["num_samples"], line["lr"]) == (1, 8, 0.1)


@pytest.mark.parametrize("observer", ["wandb", object()])
def test_observers_that_are_none_are_refused(open_run, observer):
    with pytest.raises(ArgumentError, match="observers must have on_step, on_event, close"):
        open_run(observers=[observer])


def test_steps_are_shown_where_the_run_and_its_data_were_moved_to(folder, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(folder, old)
    with trackbed.open_run(old / "run", blend=old / "blend.toml") as run:
        train(run, 3)
        state = run.state_dict()
    old.rename(new)
    with trackbed.open_run(new / "run", blend=new / "blend.toml") as run:
        run.load_state_dict(state)
        train(run, 2)
    for step in ("2", "5"):
        found = CliRunner().invoke(trackbed_command, ["show", "--run", str(new / "run"), "--step", step])
        assert found.exit_code == 0, found.output


@pytest.mark.parametrize("loss", [None, "0.5", object(), 10**400, 1j, [0.5, None]])
def test_losses_that_are_no_numbers_are_refused_and_lose_no_step(tmp_path, open_run, loss):
    with open_run() as run:
        next(iter(run.loader(batch_size=GLOBAL_BATCH)))
        with pytest.raises(ArgumentError, match="loss must be a number, or a sequence of numbers"):
            run.record(loss)
        with pytest.raises(ArgumentError, match="lr must be a value that JSON has"):
            run.record(0.5, lr=2**70)
        run.record(0.5, lr=np.float64(0.1), count=np.int64(3))
    (line,) = read_run(tmp_path / "run").steps
    assert (line["step"], line["num_samples"], line["lr"], line["count"]) == (1, 8, 0.1, 3)


def test_a_step_of_more_samples_than_there_are_is_refused(folder, tmp_path):
    (folder / "small.toml").write_text((folder / "blend.toml").read_text().replace("train = 400", "train = 20"))
    with trackbed.open_run(tmp_path / "run", blend=folder / "small.toml") as run:
        loader = run.loader(batch_size=4)
        for _ in (1, 2):
            for _ in loader:
                pass
        with pytest.raises(ArgumentError, match="a step must have at most"):
            run.record(0.5)


def test_a_closed_run_says_so(open_run):
    run = open_run()
    train(run, 2)
    run.close()
    for call in (run.flush, run.state_dict, lambda: run.record(0.5), lambda: run.event("lunch")):
        with pytest.raises(ArgumentError, match="the run must be open, found it is closed"):
            call()


def test_the_position_is_kept_before_there_is_a_loader(open_run):
    with open_run() as run:
        train(run, 3)
        state = run.state_dict()
    with open_run() as run:
        run.load_state_dict(state)
        again = run.state_dict()
    assert again["loader"] == state["loader"]
    assert again["step"] == 3


def test_a_forked_child_leaves_the_run_alone(tmp_path, open_run):
    with open_run() as run:
        train(run, 2)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                try:
                    run.event("from the child")
                except ArgumentError as error:
                    status = 0 if "by the process that opened it" in str(error) else 2
                run.close()
            finally:
                os._exit(status)
        deadline = time.monotonic() + 20
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == (child, 0)
        run.event("lunch")
    assert [event["event"] for event in read_run(tmp_path / "run").events] == ["open", "begin", "lunch", "close"]


@pytest.mark.parametrize("skip", [5, None, [[390, 10**30]], [b"ab"], ["ab"]])
def test_positions_that_cannot_be_skipped_are_refused(open_run, skip):
    with open_run() as run, pytest.raises(ArgumentError, match="skip must "):
        run.loader(batch_size=4, skip=skip)
