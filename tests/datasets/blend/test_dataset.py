import pickle

import numpy as np
import pytest

from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.datasets import BlendedDataset
from trackbed.errors import ArgumentError, OversampleError


def blended(tmp_path, weights=(3, 2, 1), **options):
    """The training split of a blend of three pairs."""
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), list(weights)), split="8,1,1", **options)
    return build(config)[0]


def test_a_sample_is_that_of_the_dataset_it_is_drawn_from(tmp_path):
    dataset = blended(tmp_path)
    for position in range(len(dataset)):
        found = dataset[position]
        member = dataset.datasets[dataset.dataset_index[position]]
        wanted = member[int(dataset.dataset_sample_index[position])]
        assert list(found) == ["dataset_id", *wanted]
        assert found["dataset_id"] == dataset.dataset_index[position]
        assert found["dataset_id"].dtype == np.int16
        assert found["tokens"].tolist() == wanted["tokens"].tolist()


def test_datasets_are_drawn_in_proportion_to_their_weights(tmp_path):
    dataset = blended(tmp_path, weights=(30, 20, 10))
    drawn = np.bincount(dataset.dataset_index)
    assert (abs(drawn - len(dataset) * np.array([3, 2, 1]) / 6) < 1).all()


def test_a_dataset_of_weight_zero_keeps_its_number_and_is_never_drawn(tmp_path):
    dataset = blended(tmp_path, weights=(1, 0, 1))
    assert len(dataset.datasets) == 3
    assert set(dataset.dataset_index.tolist()) == {0, 2}


def test_without_weights_and_size_every_sample_comes_once(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), None), split="8,1,1")
    dataset = build(config, (None, None, None))[0]
    pairs = list(zip(dataset.dataset_index.tolist(), dataset.dataset_sample_index.tolist(), strict=True))
    assert sorted(pairs) == [(k, j) for k, member in enumerate(dataset.datasets) for j in range(len(member))]


def test_without_weights_a_size_is_capped_at_what_there_is(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), None), split="8,1,1")
    dataset = build(config, (10**6, None, None))[0]
    assert len(dataset) == sum(map(len, dataset.datasets))


def test_an_empty_dataset_in_a_blend_by_length_is_never_drawn_where_megatron_core_fails(tmp_path):
    prefixes = [*write_pairs(tmp_path, 2), write_pair(tmp_path / "empty", [0, 0])]
    dataset = build(gpt_config(tmp_path / "cache", blend=(prefixes, None), split="1"), (None, None, None))[0]
    assert [len(member) for member in dataset.datasets][2] == 0
    assert set(dataset.dataset_index.tolist()) == {0, 1}


def test_a_blend_of_size_zero_is_empty(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [1, 1, 1]), split="8,1,1")
    assert len(build(config, (0, 0, 0))[0]) == 0


def test_drawing_more_than_there_is_names_the_dataset_and_the_way_out(tmp_path):
    members = blended(tmp_path).datasets
    too_many = len(members[1]) + 1
    with pytest.raises(
        OversampleError, match=rf"pair1, split train: .*found {too_many}; raise mid_level_dataset_surplus"
    ):
        BlendedDataset([members[1]], [1.0], too_many, gpt_config(None))


@pytest.mark.parametrize(
    ("weights", "size", "words"),
    [
        ([1.0], 5, "found 3 and 1"),
        ([1.0, -1.0, 1.0], 5, "dataset 1 must be a finite number of at least 0, found -1.0"),
        ([1.0, 2, 1.0], 5, "weights of one type, found float, int"),
        ([1.5, 1.0, 1.0], None, "dataset 0 must be a number of samples of at least 0, found 1.5"),
        ([0.0, 0.0, 0.0], 5, "not all 0"),
        ([1, 1, 1], -1, "must be at least 0, found -1"),
    ],
)
def test_weights_that_make_no_blend_are_refused(tmp_path, weights, size, words):
    members = blended(tmp_path).datasets
    with pytest.raises(ArgumentError, match=words):
        BlendedDataset(members, weights, size, gpt_config(None))


def test_datasets_of_different_splits_make_no_blend(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path, 1), None), split="8,1,1")
    train, valid, _ = build(config)
    with pytest.raises(AssertionError, match="one split, found train, valid"):
        BlendedDataset([train, valid], [1, 1], 5, gpt_config(None))


def test_a_blend_goes_to_a_worker_without_its_indices(tmp_path):
    dataset = blended(tmp_path)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.dataset_index is None
    assert tokens_of(again, range(5)) == tokens_of(dataset, range(5))


def test_a_blend_in_memory_is_the_same(tmp_path):
    dataset = blended(tmp_path)
    memory = BlendedDataset(dataset.datasets, [3, 2, 1], len(dataset), gpt_config(None))
    assert memory.dataset_index.tolist() == dataset.dataset_index.tolist()
    assert pickle.loads(pickle.dumps(memory)).dataset_index.tolist() == dataset.dataset_index.tolist()


def test_a_deferred_blend_is_the_same_once_a_sample_is_asked_for(tmp_path):
    before = blended(tmp_path)
    wanted = tokens_of(before, range(3))
    dataset = blended(tmp_path, defer_npy_index_mmap=True)
    assert dataset.dataset_index is None
    assert len(dataset) == len(before)
    assert tokens_of(dataset, range(3)) == wanted
    assert dataset.dataset_index.tolist() == before.dataset_index.tolist()


def test_a_blend_of_70000_datasets_works_beside_megatron_cores_names(tmp_path):
    member = blended(tmp_path).datasets[0]
    config = gpt_config(tmp_path / "wide")
    dataset = BlendedDataset([member] * 70_000, [1.0] * 70_000, 70_000, config)
    assert dataset.dataset_index.dtype == np.int32
    assert dataset.dataset_index.tolist() == list(range(70_000))
    assert not list((tmp_path / "wide").glob("*.npy"))
    again = BlendedDataset([member] * 70_000, [1.0] * 70_000, 70_000, config)
    assert dataset[69_999]["dataset_id"] == again[69_999]["dataset_id"] == 69_999
