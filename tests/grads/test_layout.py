"""Layouts of parameters in a buffer, as pure arithmetic."""

import tracemalloc
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.grads import ParameterSpec, plan_layout


def specs(*numels):
    return [ParameterSpec(f"p{number}", numel) for number, numel in enumerate(numels)]


def intervals(layout):
    return list(zip(layout.starts.tolist(), layout.stops.tolist(), layout.buckets.tolist(), strict=True))


def buckets(layout):
    return list(zip(layout.bucket_starts.tolist(), layout.bucket_stops.tolist(), strict=True))


def plan(parameters, *, ranks=1, bucket_size=None, sharded=False, **options):
    return plan_layout(parameters, data_parallel_size=ranks, bucket_size=bucket_size, sharded=sharded, **options)


LAYOUTS = st.builds(
    plan,
    st.lists(st.builds(ParameterSpec, st.just("p"), st.integers(0, 3000), st.booleans()), max_size=12),
    ranks=st.integers(1, 9),
    bucket_size=st.none() | st.integers(0, 4000),
    sharded=st.booleans(),
)


def test_the_last_parameter_comes_first_without_padding_unless_sharded():
    layout = plan(specs(5, 7, 3), ranks=4, bucket_size=10)
    assert intervals(layout) == [(10, 15, 1), (3, 10, 0), (0, 3, 0)]
    assert buckets(layout) == [(0, 10), (10, 15)]
    assert layout.bucket_numel_unpadded.tolist() == [10, 5]
    assert layout.numel == layout.numel_unpadded == 15


def test_sharded_parameters_start_at_multiples_of_64_and_buckets_end_at_one_of_128_and_the_ranks():
    layout = plan(specs(5, 7, 3), ranks=3, bucket_size=60, sharded=True)
    assert intervals(layout) == [(384, 389, 1), (64, 71, 0), (0, 3, 0)]
    assert buckets(layout) == [(0, 384), (384, 768)]
    assert layout.bucket_numel_unpadded.tolist() == [71, 5]
    assert (layout.numel, layout.numel_unpadded) == (768, 76)


def test_buckets_are_padded_for_high_bandwidth_where_that_is_asked_for():
    layout = plan(specs(5), ranks=3, sharded=True, pad_for_high_bandwidth=True)
    assert buckets(layout) == [(0, 3 << 16)]
    assert buckets(plan(specs(5), ranks=3, pad_for_high_bandwidth=True)) == [(0, 5)]


def test_a_shared_embedding_has_a_bucket_of_its_own_if_sharded():
    parameters = [ParameterSpec("first", 10), ParameterSpec("shared", 10, shared_embedding=True), *specs(10)]
    layout = plan(parameters, ranks=2, sharded=True)
    assert layout.buckets.tolist() == [2, 1, 0]
    assert layout.bucket_numel_unpadded.tolist() == [64, 10, 10]  # the first one with the padding for the next
    assert plan(parameters, ranks=2).buckets.tolist() == [0, 0, 0]


def test_a_bucket_of_size_zero_has_one_parameter():
    assert plan(specs(0, 4, 0), bucket_size=0).buckets.tolist() == [2, 1, 0]


def test_no_parameters_take_no_room():
    layout = plan([], ranks=3, sharded=True)
    assert (layout.numel, layout.numel_unpadded, buckets(layout)) == (0, 0, [])
    assert [len(part) for part in layout.pieces(2)] == [0, 0, 0]
    assert "0 parameters in 0 buckets" in str(layout)


def test_a_rank_owns_the_same_slice_of_every_bucket():
    layout = plan(specs(300, 100, 200), ranks=2, bucket_size=250, sharded=True)
    # p2 lies at [0, 200) and p1 at [256, 356) of bucket [0, 384); p0 at [384, 684) of bucket [384, 768).
    assert [part.tolist() for part in layout.pieces(0)] == [[2, 0], [0, 0], [192, 192]]
    assert [part.tolist() for part in layout.pieces(1)] == [[2, 1, 0], [192, 0, 192], [200, 100, 300]]


def test_without_sharding_every_rank_owns_whole_parameters():
    layout = plan(specs(3, 0, 2), ranks=2)
    for rank in range(2):
        assert [part.tolist() for part in layout.pieces(rank)] == [[2, 1, 0], [0, 0, 0], [2, 0, 3]]


@given(LAYOUTS)
def test_every_element_has_one_place_and_one_owner(layout):
    taken = np.zeros(layout.numel, dtype=np.int64)
    owners = [np.zeros(spec.numel, dtype=np.int64) for spec in layout.parameters]
    for spec, start, stop, bucket in zip(layout.parameters, layout.starts, layout.stops, layout.buckets, strict=True):
        assert stop - start == spec.numel
        assert layout.bucket_starts[bucket] <= start <= stop <= layout.bucket_stops[bucket]
        taken[start:stop] += 1
    assert taken.max(initial=0) <= 1
    assert layout.bucket_stops.tolist() == [*layout.bucket_starts[1:].tolist(), *layout.bucket_stops[-1:].tolist()]
    for rank in range(layout.data_parallel_size):
        pieces = layout.pieces(rank)
        places = layout.starts[pieces.parameters] + pieces.starts
        assert (np.diff(places) >= 0).all()
        for number, start, stop in zip(*pieces, strict=True):
            owners[number][start:stop] += 1
            if layout.sharded:
                bucket = layout.buckets[number]
                size = (layout.bucket_stops[bucket] - layout.bucket_starts[bucket]) // layout.data_parallel_size
                first = layout.bucket_starts[bucket] + rank * size
                assert first <= layout.starts[number] + start < layout.starts[number] + stop <= first + size
    expected = 1 if layout.sharded else layout.data_parallel_size
    assert all((one == expected).all() for one in owners)


@given(LAYOUTS)
def test_a_layout_prints_as_a_table_of_its_buckets(layout):
    lines = str(layout).splitlines()
    assert lines[0].startswith(f"{len(layout.parameters)} parameters in {len(layout.bucket_stops)} buckets")
    assert len(lines) == 3 + len(layout.bucket_stops)


def test_a_long_table_shows_the_first_and_the_last_buckets():
    lines = str(plan(specs(*[1] * 1000), bucket_size=1)).splitlines()
    assert lines[23].strip() == "... 960 more"
    assert lines[-1].split() == ["999", "999", "1", "1", "p0"]
    assert len(lines) == 44


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1, but is 0"),
        ({"bucket_size": -1}, "bucket_size must be at least 0, or None, but is -1"),
        ({"parameters": specs(1, -2)}, "p1: the number of elements must be at least 0, but is -2"),
        ({"parameters": specs(2**62, 2**62)}, "parameters must have at most 9223372036854775807 elements"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    arguments = {"parameters": specs(1), "data_parallel_size": 1, "bucket_size": None, "sharded": False, **change}
    with pytest.raises(ArgumentError, match=message):
        plan_layout(**arguments)


@pytest.mark.parametrize("rank", [-1, 2])
def test_pieces_of_a_rank_that_is_not_there_are_refused(rank):
    with pytest.raises(ArgumentError, match=rf"rank must be in \[0, 2\), but is {rank}"):
        plan(specs(1), ranks=2).pieces(rank)


def test_a_trillion_elements_are_laid_out_for_16384_ranks_in_seconds():
    numels = np.random.default_rng(1).integers(1, 20_000_000, 100_000).tolist()
    parameters = specs(*numels)
    start = perf_counter()
    layout = plan(parameters, ranks=16_384, bucket_size=16_384_000_000, sharded=True)
    planned = perf_counter()
    tracemalloc.start()
    pieces = [layout.pieces(rank) for rank in range(16_384)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stopped = perf_counter()
    assert planned - start < 2
    assert stopped - start < 10
    assert peak < 2 << 30
    assert sum(int((stops - starts).sum()) for _, starts, stops in pieces) == sum(numels)
