"""The functions against Megatron Core's own, and the generators that both leave behind."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.datasets import gpt_dataset, helpers

from trackbed.errors import ArgumentError
from trackbed.megatron.acceleration import replacements

THEIRS = {
    "documents": gpt_dataset._build_document_index,
    "shuffle": gpt_dataset._build_shuffle_index,
    "samples": helpers.build_sample_idx,
    "blend": helpers.build_blending_indices,
    "exhaustive": helpers.build_exhaustive_blending_indices,
}


def refuse(*_arguments):
    """Stands for Megatron's own function where it must not be called."""
    raise AssertionError


def equal(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and np.array_equal(found, wanted)


@st.composite
def generators(draw):
    """Two generators in one state, which may be anywhere, in the middle of a block and behind a normal number."""
    seed = draw(st.sampled_from([0, 1234, 2**32 - 1]) | st.integers(0, 2**32 - 1))
    drawn, has_normal = draw(st.sampled_from([0, 1, 623, 624, 625]) | st.integers(0, 2000)), draw(st.booleans())
    pair = np.random.RandomState(seed), np.random.RandomState(seed)
    for one in pair:
        one.randint(0, 2**32, drawn, dtype=np.uint32)
        if has_normal:
            one.standard_normal()
    return pair


def assert_in_one_state(first, second):
    for one, other in zip(first.get_state(), second.get_state(), strict=True):
        assert np.array_equal(one, other)
    assert first.random_sample() == second.random_sample()
    assert first.standard_normal() == second.standard_normal()
    assert np.array_equal(first.permutation(700), second.permutation(700))


def document_numbers():
    """Numbers of a split's documents, mostly consecutive, of types that Megatron converts to int32."""
    run = st.tuples(st.integers(0, 50), st.integers(0, 900)).map(lambda one: list(range(one[0], one[0] + one[1])))
    some = st.lists(st.integers(0, 2**31 - 1), max_size=30)
    return st.tuples(run | some, st.sampled_from([np.int32, np.int64, np.uint32])).map(lambda one: np.array(*one))


@given(documents=document_numbers(), num_epochs=st.integers(1, 5), separate=st.booleans(), pair=generators())
def test_document_indices_are_megatrons(documents, num_epochs, separate, pair):
    wanted = THEIRS["documents"](documents, num_epochs, pair[0], separate)
    found = replacements.build_document_index(refuse, documents, num_epochs, pair[1], separate)
    assert equal(found, wanted)
    assert_in_one_state(*pair)


@given(total=st.integers(0, 3000), share=st.sampled_from([0.0, 1.0]) | st.floats(0, 1), pair=generators())
def test_shuffle_indices_are_megatrons(total, share, pair):
    num_samples = int(share * total)
    wanted = THEIRS["shuffle"](num_samples, total, pair[0])
    found = replacements.build_shuffle_index(refuse, num_samples, total, pair[1])
    assert equal(found, wanted)
    assert_in_one_state(*pair)


def test_a_long_shuffle_leaves_the_state_that_megatrons_leaves():
    pair = np.random.RandomState(3), np.random.RandomState(3)
    wanted = THEIRS["documents"](np.arange(300_000, dtype=np.int32), 2, pair[0], True)
    found = replacements.build_document_index(refuse, np.arange(300_000, dtype=np.int32), 2, pair[1], True)
    assert equal(found, wanted)
    assert_in_one_state(*pair)


def test_the_three_indices_of_a_dataset_come_from_one_generator():
    pair = np.random.RandomState(1234), np.random.RandomState(1234)
    for build_documents, build_shuffle, state in (
        (THEIRS["documents"], THEIRS["shuffle"], pair[0]),
        (
            lambda *arguments: replacements.build_document_index(refuse, *arguments),
            lambda *arguments: replacements.build_shuffle_index(refuse, *arguments),
            pair[1],
        ),
    ):
        build_documents(np.arange(100), 3, state, True)
        build_shuffle(40, 90, state)
    assert_in_one_state(*pair)


@pytest.mark.parametrize(
    "state", [np.random.RandomState(np.random.PCG64(1)), np.random, type("Other", (np.random.RandomState,), {})(1)]
)
def test_other_generators_are_left_to_megatron(state):
    called = []
    replacements.build_document_index(lambda *arguments: called.append(arguments), np.arange(3), 1, state, False)
    replacements.build_shuffle_index(lambda *arguments: called.append(arguments), 3, 3, state)
    assert len(called) == 2
    assert called[0][2] is called[1][2] is state


@st.composite
def corpora(draw):
    """Lengths of documents, some empty, and visits to all of them in some order."""
    longest = draw(st.sampled_from([3, 12, 200]))
    lengths = draw(st.lists(st.just(0) | st.integers(0, longest), min_size=1, max_size=12))
    assume(sum(lengths) > 1)
    num_epochs = draw(st.integers(1, 4))
    visits = draw(st.permutations([number for number in range(len(lengths)) for _ in range(num_epochs)]))
    return np.array(lengths, dtype=np.int32), np.array(visits, dtype=np.int32), num_epochs


@given(
    corpus=corpora(),
    sequence_length=st.integers(2, 40),
    drop_partial=st.booleans(),
    extra=st.booleans() | st.sampled_from([0, 1]),
    number=st.sampled_from([int, np.int32, np.int64]),
)
def test_sample_indices_are_megatrons(corpus, sequence_length, drop_partial, extra, number):
    lengths, visits, num_epochs = corpus
    sizes = map(number, (sequence_length, num_epochs, int(lengths.sum())))
    arguments = (lengths, visits, *sizes, drop_partial, extra)
    try:
        wanted = THEIRS["samples"](*arguments)
    except AssertionError:  # it points to token -1 of an empty last document, and refuses what it made
        with pytest.raises(AssertionError):
            replacements.build_sample_idx(THEIRS["samples"], *arguments)
        return
    assert equal(replacements.build_sample_idx(THEIRS["samples"], *arguments), wanted)
    if lengths[visits[-1]] > 0:
        assert equal(replacements.build_sample_idx(refuse, *arguments), wanted)


SIZES, VISITS = np.array([5, 9], dtype=np.int32), np.array([1, 0], dtype=np.int32)


@pytest.mark.parametrize(
    "arguments",
    [
        (SIZES, VISITS, 1, 1, 14, True, True),
        (SIZES, VISITS, 2**31 - 1, 1, 14, True, True),
        (SIZES, VISITS, 4, 0, 14, True, True),
        (SIZES, VISITS, 4, 1, 1, True, True),
        (SIZES, VISITS, 4.0, 1, 14, True, True),
        (SIZES, VISITS, 4, 1, 14, None, True),
        (SIZES, VISITS.astype(np.int64), 4, 1, 14, True, True),
        (SIZES.astype(np.int64), VISITS, 4, 1, 14, True, True),
        (SIZES.tolist(), VISITS, 4, 1, 14, True, True),
        (SIZES[:0], VISITS, 4, 1, 14, True, True),
        (SIZES, VISITS[:0], 4, 1, 14, True, True),
    ],
)
def test_unusual_sample_indices_are_left_to_megatron(arguments):
    called = []
    replacements.build_sample_idx(lambda *given: called.append(given), *arguments)
    assert called == [arguments] or all(map(np.array_equal, called[0], arguments))


def test_lengths_of_an_index_file_may_lie_anywhere():
    lengths = np.arange(1, 200, dtype=np.int32)
    raw = np.frombuffer(b"three" + lengths.tobytes(), dtype=np.int32, offset=5)
    visits = np.random.default_rng(0).permutation(199).astype(np.int32)
    arguments = (visits, 64, 1, int(lengths.sum()))
    assert equal(replacements.build_sample_idx(refuse, raw, *arguments), THEIRS["samples"](lengths, *arguments))


def test_sample_indices_take_megatrons_names():
    arguments = {
        "sizes": np.array([5, 9], dtype=np.int32),
        "document_indices": np.array([1, 0], dtype=np.int32),
        "sequence_length": 4,
        "num_epochs": 1,
        "tokens_per_epoch": 14,
        "add_extra_token_to_sequence": False,
    }
    assert equal(replacements.build_sample_idx(refuse, **arguments), THEIRS["samples"](**arguments))


def test_a_document_that_is_not_there_is_named():
    lengths, visits = np.array([5, 9], dtype=np.int32), np.array([0, 2], dtype=np.int32)
    with pytest.raises(ArgumentError, match=r"visits must be in \[0, 1\], found visits\[1\] = 2"):
        replacements.build_sample_idx(refuse, lengths, visits, 4, 1, 14)


def outputs(size):
    return np.full(size, -7, dtype=np.int16), np.full(size, -7, dtype=np.int64)


@given(
    weights=st.lists(st.floats(0, 1) | st.sampled_from([0.1, 0.2]), min_size=1, max_size=40),
    fewer=st.integers(0, 3),
    size=st.integers(0, 300),
    spare=st.integers(0, 3),
    kind=st.sampled_from([list, tuple, np.array]),
)
def test_blends_are_megatrons(weights, fewer, size, spare, kind):
    found, wanted, num_datasets = outputs(size + spare), outputs(size + spare), max(1, len(weights) - fewer)
    THEIRS["blend"](*wanted, kind(weights), num_datasets, size, False)
    replacements.build_blending_indices(refuse, *found, kind(weights), num_datasets, size, False)
    assert all(map(equal, found, wanted))


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=40), spare=st.integers(0, 3))
def test_exhaustive_blends_are_megatrons(sizes, spare):
    found, wanted = outputs(sum(sizes) + spare), outputs(sum(sizes) + spare)
    THEIRS["exhaustive"](*wanted, sizes, len(sizes))
    replacements.build_exhaustive_blending_indices(refuse, *found, sizes, len(sizes))
    assert all(map(equal, found, wanted))


def not_contiguous(size):
    return np.full((size, 2), -7, dtype=np.int16)[:, 0], np.full(size, -7, dtype=np.int64)


@pytest.mark.parametrize(
    "arguments",
    [
        (*outputs(6), [0.5, 0.5], 2, 6, True),
        (*outputs(6), [0.5, -0.5], 2, 6, False),
        (*outputs(6), ["0.5", "0.5"], 2, 6, False),
        (*outputs(6), [0.5, float("nan")], 2, 6, False),
        (*outputs(6), [0.5], 2, 6, False),
        (*outputs(6), [0.5, 0.5], 2, 7, False),
        (np.zeros(6, dtype=np.int32), outputs(6)[1], [0.5, 0.5], 2, 6, False),
        (*not_contiguous(6), [0.5, 0.5], 2, 6, False),
    ],
)
def test_unusual_blends_are_left_to_megatron(arguments):
    called = []
    replacements.build_blending_indices(lambda *given: called.append(given), *arguments)
    assert len(called) == 1
    assert all(one is other for one, other in zip(called[0], arguments, strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        (*outputs(6), [3.0, 3.0], 2),
        (*outputs(6), [6, 0], 2),
        (*outputs(6), [4, 3], 2),
        (*outputs(6), [[3], [3, 4]], 2),
        (*outputs(6), (size for size in (3, 3)), 2),
    ],
)
def test_unusual_exhaustive_blends_are_left_to_megatron(arguments):
    called = []
    replacements.build_exhaustive_blending_indices(lambda *given: called.append(given), *arguments)
    assert len(called) == 1


@pytest.mark.parametrize("num_samples", [-1, 8, 3.0])
def test_unusual_sizes_of_a_shuffle_are_left_to_megatron(num_samples):
    called = []
    replacements.build_shuffle_index(lambda *given: called.append(given), num_samples, 7, np.random.RandomState(1))
    assert len(called) == 1


@pytest.mark.parametrize("documents", [[1, 2], np.array([1.0, 2.0]), np.array([[1, 2]]), np.ma.masked_array([1, 2])])
def test_unusual_documents_are_left_to_megatron(documents):
    called = []
    replacements.build_document_index(lambda *one: called.append(one), documents, 1, np.random.RandomState(1), False)
    assert len(called) == 1
