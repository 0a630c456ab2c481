import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import balanced_blend, permute, reference

TYPES = [(np.uint16, np.uint32), (np.uint16, np.int64), (np.uint32, np.uint32), (np.uint32, np.int64)]


def blend(sizes, types=TYPES[0], **options):
    total = int(np.sum(sizes))
    datasets, samples = np.full(total, 9, types[0]), np.full(total, 9, types[1])
    balanced_blend(np.asarray(sizes, dtype=np.int64), datasets, samples, **options)
    return datasets, samples


def wanted(sizes, key):
    total = int(np.sum(sizes))
    order = np.arange(total)
    if total:
        permute(order, order, size=total, key=key)
    return reference.balanced_blend(np.asarray(sizes, dtype=np.int64), order)


@pytest.mark.parametrize("types", TYPES)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), key=st.integers(0, 2**64 - 1))
def test_equals_its_reference(level, types, sizes, key):
    found = blend(sizes, types, key=key)
    assert [array.tolist() for array in found] == [array.tolist() for array in wanted(sizes, key)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_samples_in_any_number_of_threads(level, num_threads):
    sizes = np.random.default_rng(3).integers(0, 3_000, 500)
    sizes[7] = 400_000
    found = blend(sizes, key=5, num_threads=num_threads)
    for one, other in zip(found, wanted(sizes, 5), strict=True):
        assert np.array_equal(one, other)


def test_seventy_thousand_datasets():
    sizes = np.random.default_rng(4).integers(0, 4, 70_000)
    found = blend(sizes, TYPES[2], key=6)
    for one, other in zip(found, wanted(sizes, 6), strict=True):
        assert np.array_equal(one, other)


def test_the_result_for_a_key_never_changes():
    datasets, samples = blend([5, 0, 3, 4], key=1234)
    assert datasets.tolist() == GOLDEN[0]
    assert samples.tolist() == GOLDEN[1]


GOLDEN = ([0, 3, 0, 2, 3, 0, 3, 3, 0, 2, 0, 2], [0, 1, 1, 2, 2, 3, 0, 3, 4, 1, 2, 0])


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sizes": [1, -1, 2]}, "at least 0"),
        ({"sizes": [1.5, 0.5]}, "integers"),
        ({"sizes": [1, 2]}, r"sum\(sizes\) = 3 samples, found 2"),
        ({"key": -1}, "seed"),
        ({"key": 2**64}, "seed"),
        ({"datasets": np.zeros(2, np.int16)}, "dataset_index .*int16"),
        ({"samples": np.zeros(2, np.int32)}, "dataset_sample_index .*int32"),
        ({"samples": np.zeros(3, np.uint32)}, "one length"),
        ({"sizes": [0] * 65_536 + [2]}, "dataset_index must hold 65536, found uint16"),
    ],
)
def test_bad_arguments_are_refused(changes, found):
    arguments = {"sizes": [1, 1], "datasets": np.zeros(2, np.uint16), "samples": np.zeros(2, np.uint32), "key": 1}
    arguments |= changes
    with pytest.raises(ArgumentError, match=found):
        balanced_blend(np.array(arguments["sizes"]), arguments["datasets"], arguments["samples"], key=arguments["key"])


def test_the_poll_can_stop_it():
    def poll(done):
        raise InterruptedError(done)

    with pytest.raises(InterruptedError):
        blend([40_000_000, 40_000_000], key=1, num_threads=2, poll=poll)
