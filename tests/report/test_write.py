"""Reports of whole runs."""

import json
import math
import re
import time

import pytest

import trackbed
from tests.ledger.run_rank import GLOBAL_BATCH, losses_of
from tests.report.pages import began, check_page, opened, step, write_record
from trackbed.errors import ArgumentError, FormatError
from trackbed.ledger import read_run
from trackbed.report.plan import plan_report
from trackbed.report.write import read_inputs, write_report

TWO = '[[dataset]]\npath = "a"\nweight = 3\n[[dataset]]\npath = "b"\nweight = 1\n'
HOSTILE = '</title></svg><script>alert("x")</script><img src=x onerror=alert(1)> \x1b[31m \u202e & \' " {{7*7}}'


def report_of(run):
    return check_page(write_report(run).read_text())


def train(run, num_steps, saved_at=None):
    """Trains some steps; returns the state behind one of them."""
    state = None
    batches = iter(run.loader(batch_size=GLOBAL_BATCH))
    for _ in range(num_steps):
        losses = losses_of(next(batches))
        is_save = run.step % 10 == 9
        run.record(losses, grad_norm=0.5, checkpoint_seconds=0.25 * is_save, lr=0.001, memory_bytes=3 << 30)
        if is_save:
            run.event("evaluation", split="valid", loss=losses.mean().item(), datasets=[1.0, None])
        if run.step == saved_at:
            state = json.loads(json.dumps(run.state_dict()))
    return state


def test_a_run_with_a_ramp_and_a_restart_is_reported(folder, tmp_path):
    place = tmp_path / "run"
    with trackbed.open_run(place, blend=folder / "blend.toml") as run:
        run.set_weights(11, {"a": 1, "b": 3}, ramp_samples=80)
        state = train(run, 25, saved_at=20)
    with trackbed.open_run(place, blend=folder / "blend.toml") as run:
        run.load_state_dict(state)
        train(run, 20)
    plan = plan_report(read_inputs(place))
    record = read_run(place)
    facts = plan.summary
    assert (facts.num_steps, facts.samples, facts.tokens) == (40, 320, 320 * 16)
    assert (facts.num_jobs, facts.num_superseded, facts.ranks, facts.is_time_complete) == (2, 5, (1,), True)
    assert facts.last_loss == record.steps[-1]["loss"]
    assert [(one.first_sample, one.is_ramp, one.first_step, one.last_step) for one in plan.stages] == [
        (0, False, 1, 10),
        (80, True, 11, 20),
        (160, False, 21, 40),
    ]
    for stage, share in zip(plan.stages, (0.75, 0.5, 0.25), strict=True):
        assert stage.wanted.tolist() == pytest.approx([share, 1 - share])
        # The order "instant" keeps within some samples of the shares at every position.
        assert abs(stage.tokens[0] - share * stage.tokens.sum()) <= 3 * 16
    lines = record.steps
    assert sum(stage.tokens.sum() for stage in plan.stages) == sum(
        tokens for line in lines for tokens, _ in line["datasets"].values()
    )
    assert [one.step for one in plan.evaluations] == [10, 20, 30, 40]
    assert [(job.num_steps, job.num_superseded) for job in plan.jobs] == [(25, 5), (20, 0)]
    assert facts.waits[1] == pytest.approx(1.0)
    assert (list(plan.memory), list(plan.further)) == (["memory_bytes"], ["lr"])
    page = report_of(place)
    assert page.sections() == ["summary", "loss", "blend", "sources", "jobs", "waits", "memory", "further"]
    text = page.all_text()
    stage = "Stage from sample 80 (ramp): steps 11 to 20, 80 samples"
    for words in (stage, "job 2 begins after step 20", "memory_bytes"):
        assert words in text
    assert "Missing" not in text


def test_texts_of_the_record_are_escaped(tmp_path):
    blend = TWO.replace('path = "a"', f"path = 'a'\nname = {json.dumps(HOSTILE)}")
    names = {"blend": "blends/1.toml", "datasets": [HOSTILE, HOSTILE], "blend_source": HOSTILE, "host": HOSTILE}
    events = [
        opened(**names, process=HOSTILE),
        began(),
        {"event": HOSTILE, "time": 1e9 + 6},
        {"event": "evaluation", "time": 1e9 + 7, "step": 2, "split": HOSTILE, "loss": 2.0, "datasets": [HOSTILE]},
        {"event": "refused", "time": HOSTILE, "reason": HOSTILE, "step": HOSTILE},
        opened(**{**names, "blend": HOSTILE}, trackbed={"a": HOSTILE}),
        began(lines_before=2, after_step=2),
    ]
    steps = [step(number, **{HOSTILE: 0.5, "note": HOSTILE}) for number in range(1, 4)]
    steps[1]["datasets"] = {HOSTILE: [1, 2], "0": [32, HOSTILE], "1": HOSTILE, "-5": [1, 1], "\u0665": [3, 3]}
    run = write_record(tmp_path / "<b>run", events, steps, blend)
    page = report_of(run)
    source = page.source
    assert "<script" not in source
    assert "<img" not in source
    assert "<b>" not in source
    assert "\x1b" not in source
    assert "\u202e" not in source
    assert "&lt;script&gt;" in source
    assert page.text_of("h1") == ["Run <b>run"]


def test_a_run_without_steps_is_reported(folder, tmp_path):
    trackbed.open_run(tmp_path / "run", blend=folder / "blend.toml").close()
    page = report_of(tmp_path / "run")
    text = page.all_text()
    assert "The run has no steps yet." in text
    assert "No step has tokens by dataset." in text
    (tmp_path / "run" / "steps.jsonl").unlink()
    (tmp_path / "run" / "events.jsonl").write_text("")
    assert "No event is recorded." in report_of(tmp_path / "run").all_text()


def test_a_section_says_what_is_missing(tmp_path):
    lost = {"loss": None, "grad_norm": None, "stall_seconds": None, "communication_seconds": "x", "first_sample": None}
    steps = [step(number, **lost, datasets={"0": [128, None]}) for number in range(1, 4)]
    run = write_record(tmp_path / "run", [opened(datasets=["a", "b"], blend="blends/1.toml"), began()], steps)
    page = report_of(run)
    text = page.all_text()
    for words in (
        "No step has a known loss.",
        "No step has a known norm of the gradients.",
        "No evaluation is recorded.",
        "Losses by dataset are not recorded",
        "Missing: blends/1.toml: No such file or directory.",
        "Missing: 3 steps without known shares: there is no blend file to read.",
        "No step has waited for a checkpoint.",
        "No step has the seconds for which it waited.",
        "The time of a step is not known",
        "1 job without a closing event",
    ):
        assert words in text, words
    assert "memory" not in page.sections()
    assert "Steps without known shares: steps 1 to 3" in text


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1},
        step(2, datasets=3),
        step(3, num_samples=-1),
        step(4, step="4"),
        step(5, loss=1e308),
        step(6, loss=1e-308, first_sample=1e300, num_samples=2**62),
    ],
)
def test_a_line_with_damaged_values_is_reported(tmp_path, line):
    events = [opened(datasets=["a", "b"], blend="blends/1.toml"), began()]
    report_of(write_record(tmp_path / "run", events, [step(1), line, step(7)], TWO))


@pytest.mark.parametrize("after", [-1e300, 2**62, "0"])
def test_a_begin_event_with_a_damaged_step_is_reported(tmp_path, after):
    report_of(write_record(tmp_path / "run", [opened(), began(after_step=after)], [step(1), step(2)]))


@pytest.mark.parametrize("name", ["../../secret.toml", "/etc/passwd", "blends/x.toml", 5, ["blends/1.toml"]])
def test_only_files_of_the_record_are_read(tmp_path, name):
    run = write_record(tmp_path / "a" / "run", [opened(datasets=["a", "b"], blend=name), began()], [step(1)])
    (tmp_path / "secret.toml").write_text("secret")
    assert "the copy of a blend file must be blends/NUMBER.toml" in report_of(run).all_text()


def test_the_report_replaces_an_earlier_one_and_no_file_of_the_record(tmp_path):
    run = write_record(tmp_path / "run", [opened(), began()], [step(1)], TWO)
    other = tmp_path / "other.html"
    other.write_text("old")
    assert write_report(run, other) == other
    check_page(other.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.html", "run"]
    for name in ("steps.jsonl", "events.jsonl", "blends/1.toml", "../run/steps.jsonl"):
        before = (run / name).read_bytes()
        with pytest.raises(ArgumentError, match="must not replace a file of the record"):
            write_report(run, run / name)
        assert (run / name).read_bytes() == before


def test_a_folder_without_a_record_and_a_damaged_record_are_errors_of_the_record(tmp_path):
    with pytest.raises(FormatError, match=r"must be the folder of a run, with events\.jsonl, found none"):
        write_report(tmp_path)
    run = write_record(tmp_path / "run", [opened(), began()], [step(1)])
    (run / "steps.jsonl").write_text("{}\n")
    with pytest.raises(FormatError, match="a line must have the fields of its kind"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_many_jobs_datasets_keys_and_evaluations_stay_readable(tmp_path):
    datasets = {str(number): [16, 2.0 + number] for number in range(300)}
    keys = {f"key {number:02d}": number for number in range(40)}
    events, steps = [], []
    for number in range(200):
        events += [opened(time=1e9 + 100 * number, datasets=[f"d/{k}" for k in range(300)])]
        events += [began(lines_before=len(steps), after_step=2 * number, time=1e9 + 100 * number + 3)]
        steps += [step(2 * number + k, datasets=datasets, **keys) for k in (1, 2)]
        fields = {"step": 2 * number + 2, "time": 1e9 + 100 * number + 9, "split": "v", "loss": 1}
        events += [{"event": "evaluation", **fields}]
    page = report_of(write_record(tmp_path / "run", events, steps))
    text = page.all_text()
    assert "293 others" in text
    assert "The pictures show the last 30 of 200 jobs." in text
    assert "140 evaluations in between left out." in text
    assert "Not drawn: key 24" in text
    assert len(page.source) < 1 << 20


def long_record(folder, num_steps):
    """Writes the record of a long run."""
    events = [opened(datasets=["a", "b"], blend="blends/1.toml"), began()]
    events += [
        {"event": "evaluation", "time": 1e9 + 10 + number, "step": number, "split": "valid", "loss": 2.0}
        for number in range(100, num_steps, max(1, num_steps // 1000))
    ]
    write_record(folder, events, [], TWO)
    with (folder / "steps.jsonl").open("w") as file:
        for number in range(1, num_steps + 1):
            line = step(number, loss=2 + math.sin(number), lr=1e-3, checkpoint_seconds=float(number % 100 == 0))
            file.write(json.dumps(line) + "\n")
    return folder


def seconds_of_report(folder):
    start = time.process_time()
    path = write_report(folder)
    seconds = time.process_time() - start
    page = check_page(path.read_text())
    longest = max(len(re.findall("[ML]", attributes.get("d") or "")) for _, attributes, _ in page.elements)
    assert longest <= 1000
    assert len(page.source) < 1 << 20
    return seconds


def test_a_long_run_is_drawn_with_few_points(tmp_path):
    assert seconds_of_report(long_record(tmp_path / "run", 50_000)) < 5


@pytest.mark.slow
def test_a_run_of_a_million_steps_is_drawn_in_seconds(tmp_path):
    assert seconds_of_report(long_record(tmp_path / "run", 1_000_000)) < 40
