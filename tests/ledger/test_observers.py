"""Observers of a run."""

import json
import re
import time
from importlib.util import find_spec

import pytest

import trackbed
from tests.ledger.run_rank import train
from trackbed.ledger import TensorBoardObserver, WandbObserver

needs = lambda name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")  # noqa: E731


def recorded(folder, place, *observers):
    with trackbed.open_run(place, blend=folder / "blend.toml", observers=observers) as run:
        train(run, 3)
        run.event("evaluation", split="valid", loss=2.5, datasets=[2.25, None])
        run.flush()
        thread = run._recorder._thread
    for one in thread._started:
        one.join(30)
    return [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]


def test_metrics_are_those_of_the_last_step(folder, tmp_path):
    steps = recorded(folder, tmp_path / 'a "run"')
    text = (tmp_path / 'a "run"' / "metrics.prom").read_text()
    found = dict(re.findall(r"^(trackbed_\w+\{.*\}) (\S+)$", text, re.MULTILINE))
    label = r'run="a \"run\""'
    assert found[f"trackbed_step{{{label}}}"] == "3"
    assert float(found[f"trackbed_loss{{{label}}}"]) == steps[-1]["loss"]
    tokens = [int(value) for name, value in found.items() if name.startswith("trackbed_tokens_total")]
    assert sum(tokens) == 3 * 8 * 16
    assert text.endswith("# EOF\n")
    assert not list((tmp_path / 'a "run"').glob("*partial*"))


@needs("tensorboard")
def test_tensorboard_has_the_numbers_of_each_step(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = recorded(folder, tmp_path / "run", TensorBoardObserver(tmp_path / "board"))
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(one.step, pytest.approx(one.value)) for one in board.Scalars("loss")] == [
        (line["step"], line["loss"]) for line in steps
    ]
    assert [one.value for one in board.Scalars("valid/loss")] == [2.5]


@needs("wandb")
def test_wandb_has_them_offline(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    recorded(folder, tmp_path / "run", WandbObserver(project="trackbed", mode="offline", dir=str(tmp_path)))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # a process of its own writes
    while b"valid/loss" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"valid/loss" in file.read_bytes()
