"""The mapping of samples to sentences, against Megatron Core's, wherever that one ends."""

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from megatron.core.datasets import helpers

from trackbed import kernels
from trackbed.errors import ArgumentError, PlanError
from trackbed.megatron.functions import build_mapping

MANY_EPOCHS = 2**31 - 2


def both(borders, lengths, num_epochs, num_samples, *rules):
    arguments = (borders, lengths, num_epochs, num_samples, *rules)
    return build_mapping(*arguments), helpers.build_mapping(*arguments)


def is_eligible(document, min_sentences):
    return len(document) >= min_sentences and (len(document) == 1 or max(document, default=0) <= 512)


def flat(documents):
    borders = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return borders, np.array([length for document in documents for length in document], dtype=np.int32)


SENTENCE = st.one_of(st.integers(0, 40), st.integers(0, 700), st.sampled_from([512, 513]))
DOCUMENTS = st.lists(st.lists(SENTENCE, max_size=40), min_size=1, max_size=30)
PROBABILITY = st.one_of(st.sampled_from([0.0, 0.1, 1.0, 1 / 2.5, 1e-9, 4e-10, 1e-300]), st.floats(0, 1))


@given(
    documents=DOCUMENTS,
    num_samples=st.integers(0, 2000),
    max_length=st.integers(2, 512),
    probability=PROBABILITY,
    seed=st.integers(1, 2**31 - 2),
    min_sentences=st.integers(1, 3),
    first=st.integers(0, 3),
)
@example([[5] * 9], 10, 2, 1.0, 2**31 - 2, 2, 0)
def test_rows_are_those_of_megatron_core(documents, num_samples, max_length, probability, seed, min_sentences, first):
    borders, lengths = flat(documents)
    kept = documents[first:]
    assume(num_samples == 0 or any(is_eligible(document, min_sentences) for document in kept))
    ours, theirs = both(
        borders[first:], lengths, MANY_EPOCHS, num_samples, max_length, probability, seed, False, min_sentences
    )
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_epochs_end_where_they_are_limited(probability):
    borders, lengths = flat([[20] * 30, [700], [], [600, 3], [100, 7]] * 50)
    for num_epochs in (1, 2, 5):
        ours, theirs = both(borders, lengths, num_epochs, 2**62, 128, probability, 7, False, 1)
        assert len(ours) > 0
        assert np.array_equal(ours, theirs)


def test_without_short_samples_a_target_of_one_token_is_allowed():
    ours, theirs = both(*flat([[3, 4, 5, 6]]), MANY_EPOCHS, 5, 1, 0.0, 1, False, 1)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_length": 1}, r"max_length must be a whole number in \[2, "),
        ({"seed": 2**31 - 1}, "2147483646"),
        ({"seed": -1}, "seed"),
        ({"short_probability": 1.5}, "short_probability"),
        ({"min_sentences": 0}, "min_sentences"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"num_samples": -1}, "num_samples"),
        ({"borders": np.array([0, 5])}, "borders"),
        ({"borders": np.array([2, 1])}, "borders"),
        ({"lengths": np.array([3, -1, 2], dtype=np.int32)}, "lengths"),
    ],
)
def test_an_argument_out_of_range_is_named(change, words):
    arguments = {
        "borders": np.array([0, 3]),
        "lengths": np.array([3, 1, 2], dtype=np.int32),
        "num_epochs": 5,
        "num_samples": 5,
        "max_length": 8,
        "short_probability": 0.1,
        "seed": 1,
        "min_sentences": 1,
        **change,
    }
    values = [arguments[name] for name in ("borders", "lengths", "num_epochs", "num_samples", "max_length")]
    rest = [arguments["short_probability"], arguments["seed"], False, arguments["min_sentences"]]
    with pytest.raises(ArgumentError, match=words):
        build_mapping(*values, *rest)


@pytest.mark.parametrize("documents", [[], [[]], [[600, 3]], [[5]]])
def test_without_an_eligible_document_it_ends_with_a_sentence(documents):
    borders, lengths = flat(documents)
    words = "at least 2 sentences, and none of more than 512 tokens" if documents else "there must be documents"
    with pytest.raises(PlanError, match=words):
        build_mapping(borders, lengths, MANY_EPOCHS, 5, 8, 0.1, 1, False, 2)
    assert build_mapping(borders, lengths, MANY_EPOCHS, 0, 8, 0.1, 1, False, 2).shape == (0, 3)
    rules = {"max_length": 8, "short_probability": 0.1, "seed": 1, "min_sentences": 2}
    assert kernels.build_mapping(borders, lengths, num_samples=None, num_epochs=MANY_EPOCHS, **rules).shape == (0, 3)
