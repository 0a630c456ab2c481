"""Record of when buckets were communicated."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.wrapped import backward, layers, wrap
from trackbed.comm import run_ranks
from trackbed.grads import Timeline
from trackbed.grads.timeline import hidden_share

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda span: (span[0], sum(span))), max_size=6)


@given(SPANS, SPANS)
def test_the_hidden_share_counts_the_moments_of_communication_without_a_wait(operations, waits):
    def moments(spans):
        return {moment for start, stop in spans for moment in range(start, stop)}

    busy = moments(operations)
    wanted = 1.0 if not busy else 1 - len(busy & moments(waits)) / len(busy)
    assert hidden_share(operations, waits) == pytest.approx(wanted)


def test_an_operation_that_is_running_is_left_out():
    assert hidden_share([(0.0, 1.0), (0.0, math.inf)], [(0.0, 0.5)]) == 0.5


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_training_is_recorded_bucket_by_bucket(size, sharded, tmp_path):
    def work(group):
        timeline = Timeline()
        options = {"use_distributed_optimizer": sharded, "overlap_param_gather": sharded}
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, overlap_grad_reduce=True, bucket_size=10, observer=timeline, **options)
        for _ in range(3):
            wrapper.zero_grad_buffer()
            backward(wrapper, group.rank)
            wrapper.finish_grad_sync()
        timeline.write(tmp_path / f"{group.rank}.json")
        return timeline, [sum(bucket.grad_data.nbytes for bucket in one.buckets) for one in wrapper.bucket_groups]

    kind = "reduce-scatter" if sharded else "all-reduce"
    for rank, (timeline, sizes) in enumerate(run_ranks(size, work)):
        reductions = [event for event in timeline.events if event.kind == kind]
        assert [(event.step, event.bucket) for event in reductions] == [
            (step, bucket) for step in range(3) for bucket in range(2)
        ]
        for event in timeline.events:
            times = 2 if event.kind == "all-reduce" else 1
            assert event.bytes == times * (size - 1) * sizes[event.bucket] // size
            assert event.ready <= event.issued <= event.done < math.inf
        assert {event.kind for event in timeline.events} == {kind, *(["all-gather"] if sharded else [])}
        assert 0 <= timeline.hidden_share <= 1
        header, *rows = timeline.summary().splitlines()
        assert header.split()[:2] == ["step", "operations"]
        assert [row.split()[0] for row in rows] == ["0", "1", "2"]
        trace = json.loads((tmp_path / f"{rank}.json").read_bytes())
        shown = [event for event in trace["traceEvents"] if event.get("cat") == kind]
        assert [event["args"]["bytes"] for event in shown] == [event.bytes for event in reductions]
        assert all(
            event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
            for event in trace["traceEvents"]
        )


def test_an_empty_record_has_a_summary_and_a_trace(tmp_path):
    timeline = Timeline()
    assert timeline.hidden_share == 1.0
    assert len(timeline.summary().splitlines()) == 1
    timeline.write(tmp_path / "trace.json")
    timeline.write(str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
