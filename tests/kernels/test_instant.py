"""Tests of the kernels of the instant order against their references, on any number of threads."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.index.interleaving import interleaving
from trackbed.kernels import (
    BlendTrees,
    EpochShuffles,
    available_levels,
    instant_locate,
    interleaving_counts,
    reference,
)
from trackbed.kernels.instant import NODE

WORDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 300) | st.integers(0, 2**63 - 100)
LAST = 2**63 - 1


def trees_of(weights, phase_key=5, first_samples=(0,)):
    """Trees of stages whose weights are each rotated by one, with d earlier draws from dataset d."""
    drawn = np.arange(len(weights), dtype=np.int64)
    turned = [weights[turn % len(weights) :] + weights[: turn % len(weights)] for turn in range(len(first_samples))]
    blocks = [interleaving(each, drawn=drawn, phase_key=phase_key) for each in turned]
    return BlendTrees(
        len(weights),
        np.concatenate([nodes for nodes, _ in blocks]),
        np.array(first_samples, dtype=np.int64),
        np.cumsum([0, *[len(nodes) for nodes, _ in blocks[:-1]]], dtype=np.int64),
        np.array([root for _, root in blocks], dtype=np.uint32),
        np.zeros(len(blocks), dtype=np.int64),
    )


def located(trees, shuffles, positions, **options):
    positions = np.asarray(positions, dtype=np.int64)
    found = np.empty(len(positions), np.int32), np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
    instant_locate(trees, shuffles, positions, *found, **options)
    return [array.tolist() for array in found]


def shuffles_of(sizes, **blocks):
    return EpochShuffles(np.array(sizes, dtype=np.int64), np.arange(3, 3 + len(sizes), dtype=np.uint64), **blocks)


@given(
    st.lists(st.integers(0, 9) | st.integers(0, 2**80), min_size=1, max_size=30).filter(any),
    WORDS,
    st.lists(st.integers(0, 40) | st.integers(0, LAST), max_size=4),
    st.lists(POSITIONS, max_size=40),
    st.data(),
)
def test_every_level_equals_the_references(weights, phase_key, borders, positions, data):
    first_samples = sorted([0, *borders])
    trees = trees_of(weights, phase_key, first_samples)
    sizes = data.draw(st.lists(st.integers(1, 9) | st.integers(1, LAST), min_size=len(weights), max_size=len(weights)))
    shuffles = shuffles_of(sizes)
    wanted = []
    for position in positions:
        stage = int(np.searchsorted(first_samples, position, side="right")) - 1
        position_in_stage, root = position - first_samples[stage], int(trees.roots[stage])
        dataset, draw = reference.interleave(trees.block(stage), root, position_in_stage)
        sample = reference.epoch_sample(draw, size=sizes[dataset], dataset_key=int(shuffles.keys[dataset]))
        wanted.append((dataset, draw, sample))
        counts = reference.interleaving_counts(trees.block(stage), root, len(weights), position_in_stage)
        assert counts[dataset] == draw
        assert np.array_equal(interleaving_counts(trees, position), counts)
    with pytest.MonkeyPatch.context() as patch:
        for level in available_levels():
            patch.setenv("TRACKBED_ISA", level)
            assert list(zip(*located(trees, shuffles, positions), strict=True)) == wanted


def ramp_of(before, after, length, phase_key=5):
    """Trees of a ramp with d earlier draws from dataset d, and of a stage behind it."""
    none, drawn = np.zeros(len(before), dtype=np.int64), np.arange(len(before), dtype=np.int64)
    blocks = [
        interleaving(weights, drawn=first, phase_key=phase_key + number)
        for number, (weights, first) in enumerate([(before, drawn), (after, none), (after, none)])
    ]
    return BlendTrees(
        len(before),
        np.concatenate([nodes for nodes, _ in blocks]),
        np.array([0, 0, length], dtype=np.int64),
        np.cumsum([0, *[len(nodes) for nodes, _ in blocks[:-1]]], dtype=np.int64),
        np.array([root for _, root in blocks], dtype=np.uint32),
        np.array([0, length, 0], dtype=np.int64),
    )


LISTS_OF_WEIGHTS = st.integers(1, 20).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(0, 9) | st.integers(0, 2**80), min_size=size, max_size=size)] * 2)
)


@given(LISTS_OF_WEIGHTS.filter(lambda both: any(both[0]) and any(both[1])), st.integers(1, 300), st.data())
def test_a_ramp_continues_the_draws_of_each_dataset(weights, length, data):
    trees = ramp_of(*weights, length)
    datasets, draws, _ = located(trees, shuffles_of([2**60] * len(weights[0])), range(length))
    counts = list(range(len(weights[0])))
    for position, (dataset, draw) in enumerate(zip(datasets, draws, strict=True)):
        assert draw == counts[dataset]
        assert interleaving_counts(trees, position).tolist() == counts
        counts[dataset] += 1
    positions = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    found = located(trees, shuffles_of([2**60] * len(weights[0])), positions)
    assert found[0] == [datasets[position] for position in positions]
    assert found[1] == [draws[position] for position in positions]


@given(LISTS_OF_WEIGHTS.filter(lambda both: any(both[0]) and any(both[1])), st.integers(1, LAST - 9), st.data())
def test_a_ramp_of_any_length_equals_its_reference(weights, length, data):
    trees = ramp_of(*weights, length)
    positions = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    datasets, draws, _ = located(trees, shuffles_of([1] * len(weights[0])), positions)
    for position, dataset, draw in zip(positions, datasets, draws, strict=True):
        assert (dataset, draw) == reference.interleave_ramp(
            [(trees.block(stage), int(trees.roots[stage])) for stage in (0, 1)], len(weights[0]), length, position
        )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(2, 70), st.integers(1, 9), st.data())
def test_shuffles_of_blocks_equal_their_reference(sizes, block, window, data):
    trees = trees_of([1] * len(sizes))
    positions = data.draw(st.lists(st.integers(0, 1_000), max_size=20))
    datasets, draws, samples = located(trees, shuffles_of(sizes, block=block, window=window), positions)
    for dataset, draw, sample in zip(datasets, draws, samples, strict=True):
        wanted = reference.epoch_sample(draw, size=sizes[dataset], dataset_key=3 + dataset, block=block, window=window)
        assert sample == wanted


@given(st.lists(st.integers(0, 9) | st.integers(0, 2**80), min_size=1, max_size=60).filter(any), WORDS)
def test_phases_equal_their_reference(weights, key):
    nodes, _ = interleaving(weights, drawn=np.arange(len(weights)), phase_key=key)
    assert nodes["phase"][: len(weights)].tolist() == list(range(len(weights)))
    assert nodes["phase"][len(weights) :].tolist() == reference.draw_phases(nodes, len(weights), key)


def test_phases_spread_widely_in_a_flat_tree_and_stay_near_the_middle_in_a_deep_one():
    flat = np.concatenate(
        [interleaving([1] * 8, drawn=np.zeros(8, np.int64), phase_key=key)[0][8:] for key in range(99)]
    )
    assert flat["phase"].min() < 2**58
    assert flat["phase"].max() > 63 * 2**58
    # The weights on the path up from the second dataset grow as slowly as possible.
    weights, way_up = [1, 10**6], [10**6, 10**6 + 1]
    while len(weights) < 90:
        weights.append(way_up[-2] + 2)
        way_up.append(way_up[-1] + weights[-1])
    deep, _ = interleaving(weights, drawn=np.zeros(90, np.int64), phase_key=7)
    distances = np.abs(deep["phase"][90:] / 2**64 - 0.5)
    assert 0.05 < distances.max() < 15 / 8 / 3.3598 - 0.5


def test_the_last_position_of_all_is_valid():
    trees = trees_of([1, 2, 0, 3])
    datasets, draws, samples = located(trees, shuffles_of([LAST, LAST, 1, LAST]), [LAST] * 9)
    nodes, root = trees.block(0), int(trees.roots[0])
    assert set(zip(datasets, draws, strict=True)) == {reference.interleave(nodes, root, LAST)}
    assert sum(interleaving_counts(trees, LAST).tolist()) == LAST + 0 + 1 + 2 + 3
    assert trees_of([1]).roots.tolist() == [0]
    assert located(trees_of([1]), shuffles_of([LAST]), [LAST])[:2] == [[0], [LAST]]
    assert all(0 <= sample < LAST for sample in samples)


@pytest.mark.parametrize("num_positions", [0, 1, 7, 8, 9, 16_383, 16_384, 16_385, 70_000])
def test_any_number_of_threads_gives_the_same(level, num_positions):
    trees = trees_of([3, 1, 4, 1, 5, 9, 2, 6], first_samples=(0, 1_000, 1_000, 50_000))
    shuffles = shuffles_of(range(1_000, 1_008))
    positions = np.random.default_rng(0).permutation(num_positions)
    alone = located(trees, shuffles, positions)
    for num_threads in (2, 3, 8):
        assert located(trees, shuffles, positions, num_threads=num_threads) == alone
    sorted_draws = located(trees, shuffles, np.arange(num_positions))
    assert [[column[position] for position in positions] for column in sorted_draws] == alone


@pytest.mark.parametrize("blocks", [{}, {"block": 1, "window": 9}, {"block": 7, "window": 3}, {"block": 2**62}])
def test_every_epoch_of_a_dataset_gives_each_sample_once(blocks):
    shuffles = shuffles_of([1, 2, 3, 50, 64, 1_000], **blocks)
    trees = trees_of([1] * 6)
    datasets, draws, samples = (np.array(column) for column in located(trees, shuffles, np.arange(30_000)))
    for dataset, size in enumerate(shuffles.sizes.tolist()):
        its = datasets == dataset
        assert np.array_equal(draws[its], np.arange(dataset, dataset + its.sum()))
        # What came before the stage is made up, so that the first epoch may begin in its middle.
        whole = samples[its][-dataset % size :]
        epochs = whole[: len(whole) // size * size].reshape(-1, size)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(size), (len(epochs), 1)))


def test_checked_trees_cannot_be_changed():
    trees = trees_of([1, 2, 3])
    for array in (trees.nodes, trees.first_samples, trees.first_nodes, trees.roots, trees.block(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[-1]


def leaf(dataset, *, share=0, drawn=0, right=None):
    return (share, drawn, 0, dataset if right is None else right)


WRONG_TREES = [
    pytest.param([leaf(0)], [0], [0], [0], "must have 2 leaves", id="too few leaves"),
    pytest.param([leaf(0), leaf(1)], [0], [0], [2], "its root 2", id="root outside"),
    pytest.param([leaf(0), leaf(1, share=1)], [0], [0], [0], "share 0 and itself", id="leaf with a share"),
    pytest.param([leaf(0), leaf(1, right=0)], [0], [0], [0], "share 0 and itself", id="leaf that leads on"),
    pytest.param([leaf(0), leaf(1), (0, 0, 0, 1)], [0], [0], [2], "share above 0", id="inner without a share"),
    pytest.param([leaf(0), leaf(1), (1, 0, 0, 2)], [0], [0], [2], "after its children", id="circle"),
    pytest.param([leaf(0), leaf(1), (1, 0, 7, 1)], [0], [0], [2], "after its children", id="child outside"),
    pytest.param([leaf(0), leaf(1)], [1], [0], [0], "first_samples must begin with 0", id="late beginning"),
    pytest.param([leaf(0), leaf(1)] * 3, [0, 5, 4], [0, 2, 4], [0] * 3, "never decrease", id="stages go back"),
    pytest.param([leaf(0), leaf(1)] * 3, [0, 5, 6], [0, 4, 2], [0] * 3, "first_nodes .*never", id="blocks go back"),
    pytest.param([leaf(0), leaf(1)], [0, 5], [0, 3], [0] * 2, r"in \[0, 2\], found 3", id="block outside"),
    pytest.param([leaf(0), leaf(1)], [0, 5], [0], [0], r"one length .*\[2, 1, 1, 1\]", id="unequal"),
    pytest.param([leaf(0), leaf(1)], [], [], [], r"at least 1, found \[0, 0, 0, 0\]", id="no stages"),
]


@pytest.mark.parametrize(("nodes", "first_samples", "first_nodes", "roots", "found"), WRONG_TREES)
def test_trees_that_a_walk_could_leave_are_refused(nodes, first_samples, first_nodes, roots, found):
    with pytest.raises(ArgumentError, match=found):
        BlendTrees(
            2,
            np.array(nodes, dtype=NODE),
            np.array(first_samples, dtype=np.int64),
            np.array(first_nodes, dtype=np.int64),
            np.array(roots, dtype=np.uint32),
            np.zeros(len(roots), dtype=np.int64),
        )


@pytest.mark.parametrize("ramps", [[3, 0, 0], [0, -1, 0], [0, 3, 3], [0, 0, 3], [0, 3]])
def test_ramps_without_a_stage_before_them_are_refused(ramps):
    trees = ramp_of([1, 2], [2, 1], 3)
    with pytest.raises(
        ArgumentError, match=r"a ramp must have at least 0 samples and begin with a st|of one length|1, f"
    ):
        BlendTrees(2, trees.nodes, trees.first_samples, trees.first_nodes, trees.roots, np.array(ramps))


@pytest.mark.parametrize("num_datasets", [0, 2**30 + 1])
def test_the_number_of_datasets_is_limited(num_datasets):
    zeros = np.zeros(1, dtype=np.int64)
    with pytest.raises(ArgumentError, match=f"num_datasets .*found {num_datasets}"):
        BlendTrees(num_datasets, np.zeros(1, dtype=NODE), zeros, zeros, np.zeros(1, dtype=np.uint32), zeros)


@pytest.mark.parametrize(
    ("sizes", "keys", "found"),
    [
        (np.array([1, 0]), np.zeros(2, np.uint64), "dataset 1 has 0"),
        (np.array([1, 2]), np.zeros(1, np.uint64), "one length, found 2 and 1"),
        (np.array([1.0]), np.zeros(1, np.uint64), "sizes must be .*int64, found float64"),
        (np.array([1]), np.zeros(1, np.int64), "keys must be .*uint64, found int64"),
        (np.array([[1]]), np.zeros(1, np.uint64), r"found int64 and shape \[1, 1\]"),
    ],
)
def test_shuffles_that_cannot_be_are_refused(sizes, keys, found):
    with pytest.raises(ArgumentError, match=found):
        EpochShuffles(sizes, keys)


def outputs(length):
    return [np.empty(length, np.int32), np.empty(length, np.int64), np.empty(length, np.int64)]


@pytest.mark.parametrize(
    ("positions", "outputs", "options", "found"),
    [
        (np.array([0, -1]), outputs(2), {}, r"positions\[1\] = -1"),
        (np.array([0.0]), outputs(1), {}, "positions must be .*float64"),
        (np.zeros(4, np.int64)[::2], outputs(2), {}, "positions must be a contiguous"),
        (np.zeros(2, np.int64), outputs(3), {}, r"one length, found shapes \[2\], \[3\]"),
        (np.zeros(2, np.int64), [np.empty(2, np.int64), *outputs(2)[1:]], {}, "datasets must be .*int32"),
        (np.zeros(2, np.int64), [*outputs(2)[:2], np.empty(4, np.int64)[::2]], {}, "samples must be a contiguous"),
        (np.zeros(2, np.int64), outputs(2), {"num_threads": 0}, "num_threads must be at least 1, found 0"),
    ],
)
def test_arguments_that_the_kernel_cannot_take_are_refused(positions, outputs, options, found):
    with pytest.raises(ArgumentError, match=found):
        instant_locate(trees_of([1, 2]), shuffles_of([5, 5]), positions, *outputs, **options)


def test_shuffles_of_other_datasets_than_the_trees_are_refused():
    with pytest.raises(ArgumentError, match="2 datasets as the trees, found 3"):
        located(trees_of([1, 2]), shuffles_of([5, 5, 5]), [0])


@pytest.mark.parametrize("position", [-1, 2**63])
def test_counts_are_those_before_a_position_of_64_bits(position):
    with pytest.raises(ArgumentError, match=f"found {position}"):
        interleaving_counts(trees_of([1, 2]), position)


def test_the_poll_sees_progress_and_can_stop_it():
    seen = []

    def poll(done):
        seen.append(done)
        if len(seen) == 2:
            raise InterruptedError

    positions = np.zeros(20_000_000, dtype=np.int64)
    with pytest.raises(InterruptedError):
        located(trees_of([1, 2, 3]), shuffles_of([5, 5, 5]), positions, poll=poll)
    assert 0 <= seen[0] < seen[1] < len(positions)  # a busy machine may look before anything is done


def test_other_threads_run_meanwhile():
    trees, shuffles, ticks = trees_of([1, 2, 3]), shuffles_of([5, 5, 5]), 0
    worker = threading.Thread(target=located, args=(trees, shuffles, np.zeros(1_000_000, dtype=np.int64)))
    worker.start()
    while worker.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 3
