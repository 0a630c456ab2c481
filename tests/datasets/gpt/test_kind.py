"""Indices of many small datasets, made in one call: the same as those of each made alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.blends import BlendedMegatronDatasetBuilder, GPTDataset, build, gpt_config, write_pair
from tests.support.files.indexed_pair import Pair
from trackbed.cache import in_memory
from trackbed.datasets.gpt import indices as index_module
from trackbed.datasets.gpt.indices import ARRAYS, GPT_KIND, GPTIndices, build_small
from trackbed.datasets.start import Start
from trackbed.errors import FormatError, TrackbedError
from trackbed.index.ranges import number_range
from trackbed.tokens import IndexedDataset

NUMBERS = itertools.count()


@st.composite
def gpt_indices(draw, folder):
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=30))
    start, stop = sorted(draw(st.lists(st.integers(0, len(lengths)), min_size=2, max_size=2)))
    prefix = folder / f"{next(NUMBERS)}"
    Pair(prefix, lengths, list(range(len(lengths) + 1)), [0] * sum(lengths), "uint16").write()
    return GPTIndices(
        dataset=IndexedDataset(f"{prefix}", open_when_read=True),
        documents=draw(st.sampled_from([number_range(start, stop), np.arange(start, stop)])),
        num_samples=draw(st.none() | st.integers(0, 60)),
        sequence_length=draw(st.sampled_from([1, 2, 7, 16, 64])),
        seed=draw(st.sampled_from([0, 1234, 2**32 - 1])),
        extra_token=draw(st.integers(0, 1)),
        keep_partial=draw(st.booleans()),
    )


def alone(indices):
    """What one dataset gives by itself; None where that is an error."""
    try:
        return indices.build(in_memory)
    except TrackbedError:
        return None


@given(st.data())
def test_indices_made_together_are_those_made_alone(tmp_path_factory, data):
    drawn = data.draw(st.lists(gpt_indices(tmp_path_factory.mktemp("pairs")), max_size=6))
    for found, wanted in zip(build_small(drawn), map(alone, drawn), strict=True):
        assert (found is None) == (wanted is None)
        for name in ARRAYS if wanted else ():
            np.testing.assert_array_equal(found[name], wanted[name])
            assert found[name].dtype == wanted[name].dtype


@given(st.data(), st.integers(0, 40))
def test_what_is_not_small_is_left_out(tmp_path_factory, data, most):
    indices = data.draw(gpt_indices(tmp_path_factory.mktemp("pairs")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "MOST_VISITS", most)
        found, wanted = build_small([indices])[0], alone(indices)
    size = 0 if wanted is None else len(wanted["document_index"]) + len(wanted["shuffle_index"])
    assert (found is None) == (wanted is None or size > most)


def test_documents_that_do_not_follow_one_another_are_left_out(tmp_path):
    dataset = IndexedDataset(write_pair(tmp_path / "pair", [4, 5, 6]), open_when_read=True)
    scattered, whole = (
        GPTIndices(dataset, np.array(documents), 3, 2, 1, 1, keep_partial=False) for documents in ([0, 2], [1, 2])
    )
    found = build_small([scattered, whole])
    assert found[0] is None
    assert sorted(set(found[1]["document_index"].tolist())) == [1, 2]


def test_pairs_that_were_replaced_are_left_out(tmp_path):
    prefix = write_pair(tmp_path / "pair", [4, 5, 6])
    dataset = IndexedDataset(prefix, open_when_read=True)
    write_pair(tmp_path / "pair", [4, 5, 7])
    assert build_small([GPTIndices(dataset, number_range(0, 3), 3, 2, 1, 1, keep_partial=False)]) == [None]


def test_large_datasets_are_not_built_in_bundles(tmp_path):
    small, large = (write_pair(tmp_path / name, [20] * count) for name, count in (("small", 50), ("large", 100_000)))
    config = gpt_config(tmp_path / "cache", blend=([small, large] * 3, [1.0] * 6), split="8,1,1")
    start = Start()
    with start.active():
        BlendedMegatronDatasetBuilder(GPTDataset, [60, 6, 6], lambda: True, config)._build()
    requests = [one.request for one in start.requested if not one.request.kind.is_blend]
    assert [not one.kind.is_small(one) for one in requests] == [False] * 3 + [True, False, False] + [False] * 3 + [
        True,
        False,
        False,
    ] + [False] * 3 + [True, False, False]
    largest_first = sorted(requests, key=lambda one: -one.ingredients.cost())
    batches = [len(batch) for batch in GPT_KIND.build(largest_first, lambda _: in_memory)]
    assert batches == [1, 1, 1, 15]


def test_pairs_are_not_mapped_for_it(tmp_path):
    prefixes = [write_pair(tmp_path / f"pair{number}", [9, 0, 30, 12]) for number in range(8)]
    train = build(gpt_config(tmp_path / "cache", blend=(prefixes, [1.0] * 8), split="1,0,0"), (40, None, None))[0]
    assert not any("_mapped" in vars(member.dataset.index) for member in train.datasets)


def test_a_negative_length_names_its_dataset_among_many(tmp_path):
    prefixes = [write_pair(tmp_path / f"pair{number}", [9, 8, 30, 12]) for number in range(8)]
    Pair(tmp_path / "pair6", [9, -8, 30, 12], [0, 1, 2, 3, 4], list(range(43)), "uint16", [0, 18, 2, 62]).write()
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [1.0] * 8), split="1,0,0")
    with pytest.raises(FormatError, match="pair6, split train: documents must have at least 0"):
        build(config, (40, None, None))
