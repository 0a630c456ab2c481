"""Runs whose blend is changed while they go on."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import trackbed
from tests.ledger.conftest import BLEND
from tests.ledger.run_rank import GLOBAL_BATCH, losses_of
from tests.ledger.stages_of_runs import check_samples
from tests.support.files.built_pair import build
from tests.support.files.rewrite import rewrite
from tests.support.processes.launching import run_script
from trackbed.blends.schedule import check_continued, continued, with_stage
from trackbed.cli.main import trackbed as trackbed_command
from trackbed.errors import ArgumentError
from trackbed.index import BlendStage
from trackbed.ledger import read_run
from trackbed.ledger.steering import LAG

RANK = Path(__file__).parent / "steered_rank.py"
pytestmark = pytest.mark.usefixtures("settles_at_once")
STAGE = "\n[[stage]]\nfrom_sample = {}\nweights = {{{}}}\n"
THIRD = '\n[[dataset]]\npath = "c"\nweight = 2\n'


@pytest.fixture
def blend(tmp_path):
    """A blend file of a folder that tests change, with a third pair that it does not name."""
    for name, first in (("a", 1), ("b", 500), ("c", 700)):
        build(tmp_path / name, [[first + (7 * one + two) % 200 for two in range(90)] + [0] for one in range(60)])
    text = BLEND
    for name in "ab":
        text = text.replace(f'path = "{name}"', f'path = "{tmp_path / name}"\nname = "{name}"')
    (tmp_path / "blend.toml").write_text(text.replace("train = 400", "train = 4000"))
    return tmp_path / "blend.toml"


@pytest.fixture
def settles_at_once(monkeypatch):
    """Files count as written as soon as they are seen; tests replace them as a whole."""
    monkeypatch.setattr("trackbed.ledger.steering.SETTLE_SECONDS", 0.0)


def steps_of(run, num_steps, batches=None):
    """Trains some steps; returns the iterator of batches."""
    if batches is None:
        batches = iter(run.loader(batch_size=GLOBAL_BATCH))
    for _ in range(num_steps):
        run.record(losses_of(next(batches)))
    return batches


def steps_until(run, batches, is_done, most=200):
    """Trains until something is so, which it is some steps after a change; returns the number of steps."""
    for number in range(most):
        if is_done():
            return number
        steps_of(run, 1, batches)
        time.sleep(0.005)  # for the thread that opens the file
    raise AssertionError(f"not so after {most} steps")


def test_a_changed_file_takes_effect_at_the_next_step(blend, tmp_path):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        batches = steps_of(run, 10)
        rewrite(blend, blend.read_text() + STAGE.format(40, "b = 1"))
        steps_until(run, batches, lambda: "blend" in kinds(tmp_path))
        changed = [one for one in read_run(tmp_path / "run").events if one["event"] == "blend"][-1]
        steps_of(run, 10, batches)
    event = check_samples(tmp_path / "run", num_steps=run.step)
    assert event == changed
    assert event["first_sample"] == event["step"] * GLOBAL_BATCH
    assert event["stages"] == [[0, [0.75, 0.25], 0], [event["first_sample"], [0.0, 1.0], 0]]
    steps = {line["step"]: line for line in read_run(tmp_path / "run").steps}
    assert set(steps[event["step"]]["datasets"]) == {"0", "1"}
    assert set(steps[event["step"] + 1]["datasets"]) == {"1"}


def kinds(tmp_path):
    return [one["event"] for one in read_run(tmp_path / "run").events]


def test_a_dataset_may_be_added_and_a_wrong_file_changes_nothing(blend, tmp_path, caplog):
    good = blend.read_text()
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        batches = steps_of(run, 3)
        for wrong, reason in (
            ("order = [", "must be TOML"),
            (good.replace("weight = 3", "weight = -3"), "weight must be"),
            (good + THIRD.replace('"c"', '"gone"'), "gone"),
            (good.replace(f'"{tmp_path / "a"}"', f'"{tmp_path / "c"}"'), "dataset 0 must stay"),
            (good.replace("sequence_length = 16", "sequence_length = 8"), "sequence_length must stay 16"),
            (good.replace("sequence_length", "seed = 5\nsequence_length"), "random_seed must stay 1234"),
        ):
            rewrite(blend, wrong)
            before = kinds(tmp_path).count("refused")
            steps_until(run, batches, lambda before=before: kinds(tmp_path).count("refused") > before)
            assert reason in read_run(tmp_path / "run").events[-1]["reason"]
            assert reason in caplog.messages[-1]
        assert "blend" not in kinds(tmp_path)
        rewrite(blend, good + THIRD.replace('"c"', f'"{tmp_path / "c"}"\nname = "c"'))
        steps_until(run, batches, lambda: len(run.train.datasets) == 3)
        assert run.train.weights == pytest.approx([3 / 6, 1 / 6, 2 / 6])
        loader_tokens = run._loader.counters.tokens
        steps_of(run, 30, batches)
        assert loader_tokens is run._loader.counters.tokens
        assert loader_tokens[2] > 0
    event = check_samples(tmp_path / "run", num_steps=run.step)
    assert [len(weights) for _, weights, _ in event["stages"]] == [3, 3]


def test_set_weights_adds_a_stage_and_a_ramp(blend, tmp_path):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        run.set_weights(12, {"a": 1}, ramp_samples=80)
        run.set_weights(4, {"b": 1})
        batches = steps_of(run, 30)
        run.set_weights(31, {"a": 1, "b": 1})
        steps_of(run, 2, batches)
        with pytest.raises(ArgumentError, match=r"for datasets of the blend, \['a', 'b'\]; found \['c'\]"):
            run.set_weights(40, {"c": 1})
        with pytest.raises(ArgumentError, match="at least one weight must be above 0"):
            run.set_weights(40, {"a": 0})
    event = check_samples(tmp_path / "run", num_steps=32)
    starts = [(first, ramp) for first, _, ramp in event["stages"]]
    assert starts == [(0, 0), (3 * GLOBAL_BATCH, 0), (11 * GLOBAL_BATCH, 80), (30 * GLOBAL_BATCH, 0)]


def test_set_weights_counts_the_datasets_that_there_are_at_its_step(blend, tmp_path):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        run.set_weights(150, {"b": 1}, ramp_samples=80)
        batches = steps_of(run, 2)
        rewrite(blend, blend.read_text() + THIRD.replace('"c"', f'"{tmp_path / "c"}"\nname = "c"'))
        steps_until(run, batches, lambda: len(run.train.datasets) == 3, most=140)
        steps_of(run, 160 - run.step, batches)
    event = check_samples(tmp_path / "run", num_steps=160)
    assert event["stages"][-1] == [149 * GLOBAL_BATCH, [0.0, 1.0, 0.0], 80]


def test_a_run_goes_on_with_the_stages_of_its_checkpoint_and_then_with_the_file(blend, tmp_path):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        run.set_weights(4, {"b": 1}, ramp_samples=40)
        steps_of(run, 8)
        state = json.loads(json.dumps(run.state_dict()))
        run.set_weights(9, {"a": 1})
    # The job is killed; the file is changed before the next one.
    rewrite(blend, blend.read_text() + STAGE.format(200, "a = 1, b = 9"))
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        run.load_state_dict(state)
        batches = steps_of(run, 4)
        steps_until(run, batches, lambda: kinds(tmp_path).count("blend") == 4)
        steps_of(run, 20, batches)
    event = check_samples(tmp_path / "run", num_steps=run.step)
    assert [first for first, _, _ in event["stages"]][:2] == [0, 3 * GLOBAL_BATCH]
    assert event["stages"][-1][0] == max(200, event["first_sample"])
    for step in (2, 5, 9, run.step):
        found = CliRunner().invoke(trackbed_command, ["show", "--run", str(tmp_path / "run"), "--step", str(step)])
        assert found.exit_code == 0, found.output


def test_a_file_that_is_being_written_is_not_looked_at(blend, tmp_path, monkeypatch):
    monkeypatch.setattr("trackbed.ledger.steering.SETTLE_SECONDS", 0.4)
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        batches = steps_of(run, 3)
        for number in range(8):
            rewrite(blend, blend.read_text() + f"# {number}\n")
            steps_of(run, 2, batches)
            time.sleep(0.1)
        assert "blend" not in kinds(tmp_path)
        rewrite(blend, blend.read_text() + STAGE.format(9000, "b = 1"))
        started = time.monotonic()
        while "blend" not in kinds(tmp_path):
            steps_of(run, 1, batches)
            time.sleep(0.02)
        assert time.monotonic() - started > 0.4


def test_a_blend_of_one_dataset_or_another_order_is_not_steered(blend, tmp_path):
    text = blend.read_text()
    rewrite(blend, text.replace('"instant"', '"megatron"').replace("train = 4000", "train = 100"))
    with trackbed.open_run(tmp_path / "run", blend=blend, cache=tmp_path / "cache") as run:
        with pytest.raises(ArgumentError, match='set_weights needs a blend of several datasets in the order "instant"'):
            run.set_weights(1, {"a": 1})
        batches = steps_of(run, 2)
        rewrite(blend, text)
        steps_of(run, 2 * LAG + 3, batches)
    assert kinds(tmp_path) == ["open", "begin", "close"]


# ---------------------------------------------------------------- several ranks


def run_ranks(blend, tmp_path, case):
    return [lines[0] for lines in run_script(RANK, 2, blend, tmp_path / "run", case, limit_seconds=90)]


@pytest.mark.dist
def test_ranks_take_over_a_change_at_one_step(blend, tmp_path):
    results = run_ranks(blend, tmp_path, "file")
    assert results[0]["events"].count("blend") == 2
    check_samples(tmp_path / "run", num_steps=results[0]["steps"])
    assert results[0]["stages"] == results[1]["stages"]


@pytest.mark.dist
def test_a_rank_that_cannot_open_a_change_leaves_the_blend_as_it_was(blend, tmp_path):
    results = run_ranks(blend, tmp_path, "one cannot")
    assert results[0]["events"].count("blend") == 0
    (refused,) = [one for one in read_run(tmp_path / "run").events if one["event"] == "refused"]
    assert refused["reason"] == "rank 1: this rank cannot"


@pytest.mark.dist
def test_ranks_that_set_other_weights_are_an_error_on_all(blend, tmp_path):
    results = run_ranks(blend, tmp_path, "differs")
    assert all("alike, found others on rank 1" in result["error"] for result in results)


# ---------------------------------------------------------------- stages


def stage(first, *weights, ramp=0):
    return BlendStage(first, weights, ramp)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([stage(0, 1, 1)], [stage(0, 2, 2, 0)], [stage(0, 1, 1, 0)]),
        ([stage(0, 1, 1)], [stage(0, 1, 2)], [stage(0, 1, 1), stage(50, 1, 2)]),
        ([stage(0, 1, 1), stage(60, 1, 0)], [stage(0, 1, 1)], [stage(0, 1, 1)]),
        ([stage(0, 1, 1)], [stage(0, 1, 1), stage(50, 0, 1)], [stage(0, 1, 1), stage(50, 0, 1)]),
        ([stage(0, 1, 1)], [stage(0, 1, 1), stage(30, 0, 1)], [stage(0, 1, 1), stage(50, 0, 1)]),
        (
            [stage(0, 1, 1)],
            [stage(0, 1, 1), stage(30, 0, 1, ramp=100)],
            [stage(0, 1, 1), stage(50, 0, 1, ramp=80)],
        ),
        (
            [stage(0, 1, 1), stage(30, 0, 1, ramp=100)],
            [stage(0, 5, 1), stage(30, 0, 1, ramp=100), stage(70, 1, 0)],
            [stage(0, 1, 1), stage(30, 0, 1, ramp=100), stage(70, 1, 0)],
        ),
        (
            [stage(0, 1, 1), stage(10, 0, 1, ramp=20)],
            [stage(0, 0, 1)],
            [stage(0, 1, 1), stage(10, 0, 1, ramp=20)],
        ),
    ],
)
def test_what_was_drawn_stays_and_the_rest_is_as_the_file_says(before, after, found):
    assert continued(before, after, 50) == found


def test_a_stage_replaces_one_of_the_same_sample():
    stages = [stage(0, 1, 1), stage(9, 1, 0)]
    assert with_stage(stages, stage(9, 0, 1)) == [stages[0], stage(9, 0, 1)]
    assert with_stage(stages, stage(5, 0, 1)) == [stages[0], stage(5, 0, 1), stages[1]]


def test_limits_that_would_change_what_was_drawn_are_refused(blend):
    def opened(limit):
        text = blend.read_text().replace("weight = 3", f"weight = 3\n{limit}").replace("train = 4000", "train = 900")
        blend.with_name("limited.toml").write_text(text + '\n[options]\nblend_when_exhausted = "reweight"\n')
        return trackbed.open_blend(blend.with_name("limited.toml")).train

    with pytest.raises(ArgumentError, match="samples before 800 must stay as they were, found limits"):
        check_continued(opened("max_epochs = 3"), opened("max_epochs = 1"), 800)
    check_continued(opened("max_epochs = 3"), opened("max_epochs = 1"), 100)


@pytest.mark.parametrize("datasets", [1, 2])
def test_a_run_that_is_made_longer_goes_on_behind_its_last_sample(blend, tmp_path, datasets):
    text = blend.read_text() if datasets == 2 else "[[dataset]]".join(blend.read_text().split("[[dataset]]")[:2])
    rewrite(blend, text.replace("train = 4000", "train = 80"))
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        steps_of(run, 10)
        state = run.state_dict()
    rewrite(blend, text)
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        run.load_state_dict(state)
        steps_of(run, 10)
        assert len(run.train) == 4000
    lines = read_run(tmp_path / "run").steps
    assert [line["first_sample"] for line in lines] == list(range(0, 160, GLOBAL_BATCH))
    assert len({line["batch_hash"] for line in lines}) == 20


def test_a_file_that_does_not_fit_a_state_changes_nothing_of_what_it_evaluates(blend, tmp_path, caplog):
    text = blend.read_text()
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        steps_of(run, 3)
        state = run.state_dict()
        valid = [one.dataset_path for one in run.splits.valid.datasets]
    first, one, two = text.split("[[dataset]]")[:3]
    rewrite(blend, "[[dataset]]".join([first, two, one]))
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        run.load_state_dict(state)
        steps_of(run, 3)
        assert [one.dataset_path for one in run.splits.valid.datasets] == valid
    assert kinds(tmp_path).count("refused") == 1
    assert "dataset 0 must stay" in caplog.text
    assert [line["first_sample"] for line in read_run(tmp_path / "run").steps] == list(range(0, 48, GLOBAL_BATCH))


def hashes_of(folder):
    return [line["batch_hash"] for line in read_run(folder).steps]


def test_several_changes_behind_one_step_end_no_loop(blend, tmp_path):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        run.set_weights(5, {"a": 1, "b": 1})
        run.set_weights(5, {"a": 1, "b": 3})
        for batch in run.loader(batch_size=GLOBAL_BATCH):
            run.record(losses_of(batch))
            if run.step == 12:
                break
    assert run.step == 12
    check_samples(tmp_path / "run", num_steps=12)


@pytest.mark.parametrize("ramp", [0, 24])
def test_weights_for_the_first_step_count_from_its_first_sample(blend, tmp_path, ramp):
    for name in ("before", "after"):
        with trackbed.open_run(tmp_path / name, blend=blend) as run:
            if name == "before":
                run.set_weights(1, {"a": 1, "b": 3}, ramp_samples=ramp)
            loader = run.loader(batch_size=GLOBAL_BATCH)
            if name == "after":
                run.set_weights(1, {"a": 1, "b": 3}, ramp_samples=ramp)
            steps_of(run, 8, iter(loader))
    assert hashes_of(tmp_path / "before") == hashes_of(tmp_path / "after")
    assert check_samples(tmp_path / "before", num_steps=8)["first_sample"] == 0


@pytest.mark.parametrize("order", ["wls", "wsl", "lws", "lsw", "slw"])
def test_weights_that_a_state_has_are_not_given_again(blend, tmp_path, order):
    """`w` sets weights, `l` makes the loader, `s` loads the state, in any order."""
    with trackbed.open_run(tmp_path / "whole", blend=blend) as run:
        run.set_weights(11, {"a": 1, "b": 3}, ramp_samples=24)
        batches = steps_of(run, 10)
        state = json.loads(json.dumps(run.state_dict()))
        steps_of(run, 10, batches)
    with trackbed.open_run(tmp_path / "whole", blend=blend) as run:
        loader = None
        for letter in order:
            if letter == "w":
                run.set_weights(11, {"a": 1, "b": 3}, ramp_samples=24)
            elif letter == "l":
                loader = run.loader(batch_size=GLOBAL_BATCH)
            else:
                run.load_state_dict(state)
        steps_of(run, 10, iter(loader))
    record = read_run(tmp_path / "whole")
    assert [line["batch_hash"] for line in record.superseded] == hashes_of(tmp_path / "whole")[10:]


@pytest.mark.parametrize("size", [2, 8, 60])
def test_a_size_below_the_position_is_refused(blend, tmp_path, size):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        batches = steps_of(run, 12)
        rewrite(blend, blend.read_text().replace("train = 4000", f"train = {size}"))
        steps_until(run, batches, lambda: "refused" in kinds(tmp_path))
        steps_of(run, 3, batches)
    (refused,) = [one["reason"] for one in read_run(tmp_path / "run").events if one["event"] == "refused"]
    assert "size must be at least" in refused
    assert [line["first_sample"] for line in read_run(tmp_path / "run").steps] == list(range(0, 8 * run.step, 8))


def test_a_file_that_is_no_blend_file_any_more_is_not_read(blend, tmp_path):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        batches = steps_of(run, 2)
        rewrite(blend, blend.read_text() + "#" * (2 << 20))
        steps_until(run, batches, lambda: "refused" in kinds(tmp_path))
        blend.unlink()
        os.mkfifo(blend)
        steps_of(run, 5, batches)
    assert "must have at most 1048576 bytes" in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {**state, "blend": "x"},
        lambda state: {**state, "blend": {}},
        lambda state: {**state, "blend": {"content": 5, "stages": None}},
        lambda state: {**state, "blend": {**state["blend"], "stages": "abc"}},
        lambda state: {**state, "blend": {**state["blend"], "stages": [[0, ["a"], 0]]}},
        lambda state: {**state, "loader": None},
        lambda state: {**state, "step": 2**70},
    ],
)
def test_a_damaged_state_is_refused(blend, tmp_path, damage):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run:
        steps_of(run, 2)
        state = run.state_dict()
    damaged, run = damage(state), trackbed.open_run(tmp_path / "run", blend=blend)
    with run, pytest.raises(ArgumentError, match="the state of a run must have"):
        run.load_state_dict(damaged)


@pytest.mark.parametrize("weights", [{"a": "1"}, ["a"], None, {"a": 10**400}, {"a": None}])
def test_weights_that_are_no_numbers_are_refused(blend, tmp_path, weights):
    with trackbed.open_run(tmp_path / "run", blend=blend) as run, pytest.raises(ArgumentError, match="must be"):
        run.set_weights(3, weights)
