import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import exhaustive_blend, greedy_blend, reference

SMALLEST = 5e-324


@st.composite
def weight_vectors(draw):
    """Weights of 1 to 40 datasets: arbitrary, in ties, an ulp apart, zero, denormal, negative and huge."""
    ordinary = st.floats(0, 1)
    around = draw(st.floats(0.001, 1))
    ulp_apart = st.sampled_from([np.nextafter(around, 0), around, np.nextafter(around, 2)])
    tied = st.sampled_from([0.25, 0.5])
    odd = st.sampled_from([0.0, SMALLEST, 3 * SMALLEST, -1.0, 1e308, 2.0**-1022])
    kind = draw(st.sampled_from([ordinary, ulp_apart, tied, odd, st.one_of(ordinary, odd)]))
    return np.array(draw(st.lists(kind, min_size=1, max_size=40)), dtype=np.float64)


size_vectors = st.lists(st.integers(1, 12), min_size=0, max_size=40).map(lambda sizes: np.array(sizes, dtype=np.int64))
id_types = st.sampled_from([np.int16, np.int32])


def outputs(num_samples, id_type=np.int16):
    return np.full(num_samples, -1, dtype=id_type), np.full(num_samples, -1, dtype=np.int64)


@given(weights=weight_vectors(), num_samples=st.integers(0, 150), id_type=id_types)
def test_greedy_blend_equals_its_reference(level, weights, num_samples, id_type):
    datasets, samples = outputs(num_samples, id_type)
    greedy_blend(weights, datasets, samples)
    with np.errstate(over="ignore"):
        wanted = reference.greedy_blend(weights, num_samples)
    assert datasets.tolist() == wanted[0].tolist()
    assert samples.tolist() == wanted[1].tolist()


@st.composite
def many_weights(draw):
    """Weights of 65 to 300 datasets with few distinct values, for some datasets or for all."""
    size = draw(st.integers(65, 300))
    values = draw(st.lists(st.floats(0.001, 1), min_size=1, max_size=4))
    alone = draw(st.sampled_from([0.0, 0.1, 0.7]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shared = rng.choice(values, size)
    return np.where(rng.random(size) < alone, rng.random(size), shared)


@settings(max_examples=max(settings().max_examples // 4, 5))
@given(weights=many_weights(), num_samples=st.integers(1_000, 3_000))
def test_greedy_blend_of_many_equal_weights_equals_its_reference(level, weights, num_samples):
    weights = weights / weights.sum()
    datasets, samples = outputs(num_samples)
    greedy_blend(weights, datasets, samples)
    wanted = reference.greedy_blend(weights, num_samples)
    assert np.array_equal(datasets, wanted[0])
    assert np.array_equal(samples, wanted[1])


@settings(max_examples=max(settings().max_examples // 4, 5))
@given(sizes=many_weights())
def test_exhaustive_blend_of_many_equal_sizes_equals_its_reference(level, sizes):
    sizes = np.ceil(20 * sizes).astype(np.int64)
    sizes[0] += 1  # equal sizes would alternate
    datasets, samples = outputs(int(sizes.sum()))
    exhaustive_blend(sizes, datasets, samples)
    wanted = reference.exhaustive_blend(sizes)
    assert np.array_equal(datasets, wanted[0])
    assert np.array_equal(samples, wanted[1])


@given(sizes=size_vectors, id_type=id_types)
def test_exhaustive_blend_equals_its_reference(level, sizes, id_type):
    datasets, samples = outputs(int(sizes.sum()), id_type)
    exhaustive_blend(sizes, datasets, samples)
    wanted = reference.exhaustive_blend(sizes)
    assert datasets.tolist() == wanted[0].tolist()
    assert samples.tolist() == wanted[1].tolist()


@given(weights=weight_vectors(), num_samples=st.integers(0, 150))
def test_each_dataset_gives_its_samples_in_order(weights, num_samples):
    datasets, samples = outputs(num_samples)
    greedy_blend(weights, datasets, samples)
    for dataset in range(len(weights)):
        drawn = samples[datasets == dataset]
        assert drawn.tolist() == list(range(len(drawn)))


@given(sizes=size_vectors)
def test_exhaustive_blend_draws_every_sample_once(sizes):
    datasets, samples = outputs(int(sizes.sum()))
    exhaustive_blend(sizes, datasets, samples)
    drawn = sorted(zip(datasets.tolist(), samples.tolist(), strict=True))
    assert drawn == [(dataset, sample) for dataset in range(len(sizes)) for sample in range(sizes[dataset])]


def test_the_first_of_equal_datasets_wins_wherever_it_lies(level):
    for size in range(1, 34):
        for first in range(size):
            weights = np.full(size, 0.25)
            weights[first:] = 0.5
            datasets, samples = outputs(1)
            greedy_blend(weights, datasets, samples)
            assert datasets[0] == first


@pytest.mark.parametrize("num_others", [0, 14])
def test_a_product_and_a_difference_are_rounded_apart(level, num_others):
    # Both 0.6 * 5 - 3 and 0.4 * 5 - 2 are 0 when the product is rounded first, and dataset 0 wins sample 5. In
    # a fused multiply-add they are -1.1e-16 and 1.1e-16, and dataset 1 would. The others are never drawn.
    datasets, samples = outputs(8)
    greedy_blend(np.array([0.6, 0.4] + [0.0] * num_others), datasets, samples)
    assert datasets.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]


def test_dataset_numbers_wrap_where_their_type_is_too_narrow():
    weights = np.zeros(32769)
    weights[32768] = 1.0
    datasets, samples = outputs(1)
    greedy_blend(weights, datasets, samples)
    assert datasets[0] == -32768


def test_unaligned_and_strided_weights_are_taken():
    raw = b"\x00" + np.array([0.5, 0.25, 0.25]).tobytes()
    unaligned = np.frombuffer(raw, dtype=np.float64, offset=1)
    strided = np.array([0.5, 9.0, 0.25, 9.0, 0.25, 9.0])[::2]
    for weights in (unaligned, strided):
        datasets, samples = outputs(4)
        greedy_blend(weights, datasets, samples)
        assert datasets.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("weights", "found"),
    [([], r"\[\]"), ([[0.5]], r"\[\[0\.5\]\]"), ([0.5, np.nan], "nan"), ([np.inf], "inf"), (0.5, r"0\.5")],
)
def test_greedy_blend_refuses_weights(weights, found):
    with pytest.raises(ArgumentError, match=f"weights .*{found}"):
        greedy_blend(np.array(weights), *outputs(3))


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([1, 0], r"\[1 0\]"),
        ([-1], r"\[-1\]"),
        ([[1]], r"\[\[1\]\]"),
        ([1.5, 2.5], r"\[1\.5 2\.5\]"),
        ([2**63], "9223372036854775808"),
    ],
)
def test_exhaustive_blend_refuses_sizes(sizes, found):
    with pytest.raises(ArgumentError, match=f"sizes .*{found}"):
        exhaustive_blend(np.array(sizes), *outputs(3))


def test_exhaustive_blend_refuses_sizes_whose_sum_wraps_around_to_the_outputs_length():
    sizes = np.array([2**62, 2**62, 2**62, 2**62, 3])
    with pytest.raises(ArgumentError, match=f"{2**64 + 3} samples, found 3"):
        exhaustive_blend(sizes, *outputs(3))


def read_only(array):
    array.flags.writeable = False
    return array


# If an output is not written in place, a copy is filled and the result lost.
WRONG_OUTPUTS = [
    pytest.param(np.zeros(3, np.int64), np.zeros(3, np.int64), "dataset_index .*int64", id="wide ids"),
    pytest.param(np.zeros(3, np.uint16), np.zeros(3, np.int64), "dataset_index .*uint16", id="unsigned ids"),
    pytest.param(np.zeros(3, ">i2"), np.zeros(3, np.int64), "dataset_index .*>i2", id="foreign byte order"),
    pytest.param(np.zeros(3, np.int16), np.zeros(3, np.int32), "dataset_sample_index .*int32", id="narrow samples"),
    pytest.param(np.zeros(6, np.int16)[::2], np.zeros(3, np.int64), r"dataset_index .*\(4,\)", id="strided"),
    pytest.param(
        np.zeros(3, np.int16), np.zeros(6, np.int64)[::2], r"dataset_sample_index .*\(16,\)", id="strided samples"
    ),
    pytest.param(read_only(np.zeros(3, np.int16)), np.zeros(3, np.int64), "dataset_index .*False", id="read-only"),
    pytest.param(np.zeros(3, np.int16), np.zeros(2, np.int64), r"dataset_index and .*\(3,\) and \(2,\)", id="unequal"),
    pytest.param(np.zeros((3, 1), np.int16), np.zeros((3, 1), np.int64), r"dataset_index and .*\(3, 1\)", id="2-d"),
]


@pytest.mark.parametrize(("datasets", "samples", "found"), WRONG_OUTPUTS)
def test_outputs_that_cannot_be_filled_in_place_are_refused(datasets, samples, found):
    with pytest.raises(ArgumentError, match=found):
        greedy_blend(np.array([0.5, 0.5]), datasets, samples)
    with pytest.raises(ArgumentError, match=found):
        exhaustive_blend(np.array([2, 1]), datasets, samples)


def test_exhaustive_blend_refuses_outputs_of_another_length_than_the_sum():
    for length in (0, 3, 5):
        with pytest.raises(ArgumentError, match=rf"sum\(sizes\) = 4 samples, found {length}"):
            exhaustive_blend(np.array([3, 1]), *outputs(length))


def test_other_threads_run_while_a_blend_is_drawn():
    weights = np.random.default_rng(1).random(2000)
    worker = threading.Thread(target=greedy_blend, args=(weights, *outputs(1_000_000, np.int32)))
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 5
