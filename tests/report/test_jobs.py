"""Jobs of a run: their steps and times."""

from hypothesis import given
from hypothesis import strategies as st

from tests.report.pages import began, opened
from trackbed.ledger.record import which_count
from trackbed.report.jobs import jobs_of

JOBS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6), st.booleans()), min_size=1, max_size=8)


@given(JOBS)
def test_steps_trained_again_are_those_that_do_not_count(jobs):
    events, steps, before = [], [], []
    last = 0
    for after, count, is_new_job in jobs:
        after = min(after, last)
        if is_new_job or not events:
            events.append(opened())
        events.append({**began(after_step=after), "steps_bytes": 10 * len(steps)})
        before.append(len(steps))
        steps += range(after + 1, after + count + 1)
        last = after + count if count else last
    counts = which_count(
        [(10 * place, step) for place, step in enumerate(steps)],
        [(one["steps_bytes"], one["after_step"]) for one in events if one["event"] == "begin"],
    )
    found = jobs_of(events, before, len(steps))
    assert sum(job.num_steps for job in found) == len(steps)
    assert sum(job.num_superseded for job in found) == counts.count(False)
    kept = [
        step
        for job in found
        for one in job.segments
        for step in range(one.after_step + 1, one.last_step - one.num_superseded + 1)
    ]
    assert kept == [step for step, does_count in zip(steps, counts, strict=True) if does_count]


def test_the_pace_is_that_of_the_last_event_whose_step_counts():
    events = [
        opened(time=100.0),
        began(time=110.0),
        {"event": "evaluation", "time": 130.0, "step": 11},
        {"event": "evaluation", "time": 150.0, "step": 21},
        opened(time=200.0),
        {"event": "blend", "time": 201.0, "step": 15},
        began(after_step=15, time=203.0),
        {"event": "close", "time": 208.0, "step": 20},
    ]
    first, second = jobs_of(events, [0, 25], 30)
    assert (first.startup_seconds, first.known_seconds, first.closed) == (10.0, 50.0, None)
    assert (first.num_steps, first.num_superseded) == (25, 10)
    assert first.segments[0].pace == (2, 11, 20.0)
    assert (second.segments[0].pace, second.closed) == ((17, 20, 5.0), 208.0)


def test_events_without_the_usual_fields_are_jobs_without_times():
    events = [began(time="soon"), {"event": "close"}, {"time": -5}, opened(time=None)]
    first, second = jobs_of(events, [0], 3)
    assert (first.opened, first.startup_seconds, first.num_steps, first.segments[0].pace) == (None, None, 3, None)
    assert (second.known_seconds, second.num_steps) == (None, 0)
