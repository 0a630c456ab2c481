"""Which lines of a run count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import FormatError
from trackbed.ledger import read_run
from trackbed.ledger.record import which_count

JOBS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 8)), max_size=12)


@given(jobs=JOBS)
def test_the_last_job_that_trained_a_step_counts_and_nothing_behind_where_a_job_began(jobs):
    steps, begins, counting, last = [], [], {}, 0
    for wanted, count in jobs:
        after = wanted % (last + 1)
        begins.append((10 * len(steps), after))
        if count:  # without a step, a job has changed nothing but where the next ones may begin
            counting = {step: line for step, line in counting.items() if step <= after}
        for step in range(after + 1, after + count + 1):
            counting[step] = len(steps)
            steps.append((10 * len(steps), step))
        last = max(counting, default=0)
    found = which_count(steps, begins)
    lines = {step: number for number, ((_, step), counts) in enumerate(zip(steps, found, strict=True)) if counts}
    assert sum(found) == len(lines)
    # A job that began and trained nothing leaves the lines before it.
    assert lines == counting


@pytest.mark.parametrize(
    ("steps", "events", "words"),
    [
        ("", None, "must be the folder of a run, with events.jsonl, found none"),
        ('{"loss":1}\n', '{"event":"begin","after_step":0,"steps_bytes":0}\n', "must have the fields of its kind"),
        ("", '{"event":"begin"}\n', "must have the fields of its kind"),
        ("1\n", '{"event":"open"}\n', "must be a JSON object"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, steps, events, words):
    (tmp_path / "steps.jsonl").write_text(steps)
    if events is not None:
        (tmp_path / "events.jsonl").write_text(events)
    with pytest.raises(FormatError, match=words):
        read_run(tmp_path)
