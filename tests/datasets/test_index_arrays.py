"""Index arrays that are replaced, copied and pickled."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

from tests.support.files.blends import build, gpt_config, write_pair
from trackbed.datasets import GPTDataset, MockGPTDataset
from trackbed.errors import ArgumentError
from trackbed.index import Split
from trackbed.tokens import IndexedDataset

ORDERS = ("megatron", "balanced")


@pytest.fixture
def prefixes(tmp_path):
    return [write_pair(tmp_path / name, range(3, 3 + count)) for name, count in (("a", 30), ("b", 20))]


def single(prefixes, cache, **options):
    return build(gpt_config(cache, blend=(prefixes[:1], None), split="1", **options), (20, None, None))[0]


def blend(prefixes, cache, **options):
    return build(gpt_config(cache, blend=(prefixes, [1, 2]), split="1", **options), (20, None, None))[0]


def made_up(_prefixes, cache, **options):
    config = gpt_config(cache, split="1", **options)
    return build(config, (20, None, None), cls=MockGPTDataset)[0]


def samples(dataset):
    return [dataset[position]["tokens"].tolist() for position in range(10)]


def gathered(dataset):
    return dataset.gather(list(range(10)))["tokens"].tolist()


def reverse(dataset, names):
    """Replaces arrays by themselves in reverse."""
    _ = dataset[0]
    for name in names:
        setattr(dataset, name, np.array(getattr(dataset, name))[::-1].copy())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"defer_npy_index_mmap": True}, {"path_to_cache": None}])
@pytest.mark.parametrize(
    ("make", "names"),
    [(single, ["shuffle_index"]), (blend, ["dataset_index", "dataset_sample_index"])],
)
def test_a_replaced_index_is_the_datasets_own_and_its_copies(tmp_path, prefixes, make, names, options, order):
    options = {"path_to_cache": tmp_path / "cache", **options}
    if "defer_npy_index_mmap" in options:
        make(prefixes, tmp_path / "cache", order=order)
    original = make(prefixes, options.pop("path_to_cache"), order=order, **options)
    before = samples(original)
    assert gathered(original) == before
    shallow = copy.copy(original)
    reverse(shallow, names)
    replaced = samples(shallow)
    assert replaced != before
    assert (samples(original), gathered(original)) == (before, before)
    assert gathered(shallow) == replaced
    for made in (copy.copy(shallow), copy.deepcopy(shallow), pickle.loads(pickle.dumps(shallow))):
        assert (samples(made), gathered(made)) == (replaced, replaced)

    reverse(original, names)  # after it was gathered from
    assert (samples(original), gathered(original)) == (replaced, replaced)
    for name in names:
        setattr(original, name, None)
    assert getattr(original, names[0]) is None
    assert (samples(original), gathered(original)) == (before, before)


def test_a_replaced_index_of_a_member_counts_in_its_blend(tmp_path, prefixes):
    dataset = blend(prefixes, tmp_path / "cache")
    before = gathered(dataset)
    for member in dataset.datasets:
        reverse(member, ["shuffle_index"])
    assert gathered(dataset) == samples(dataset) != before


def test_a_replaced_index_reaches_worker_processes(tmp_path, prefixes):
    dataset = single(prefixes, tmp_path / "cache")
    reverse(dataset, ["shuffle_index"])
    loader = torch.utils.data.DataLoader(dataset, batch_size=1, num_workers=1, multiprocessing_context="spawn")
    found = [batch["tokens"][0].tolist() for batch in loader]
    assert found[:10] == samples(dataset)


def test_the_length_is_that_of_a_replaced_sample_index(tmp_path, prefixes):
    dataset = single(prefixes, tmp_path / "cache")
    dataset.sample_index = np.array(dataset.sample_index)[:6]
    dataset.shuffle_index = np.arange(5, dtype=np.uint32)
    assert len(dataset) == 5
    assert len(samples_of(dataset, 5)) == 5


def samples_of(dataset, count):
    return [dataset[position]["tokens"] for position in range(count)]


def test_mock_data_have_indices_of_their_own(tmp_path):
    original = made_up(None, tmp_path / "cache")
    before, other = samples(original), copy.copy(original)
    reverse(other, ["shuffle_index"])
    assert samples(original) == before != samples(other)


@pytest.mark.parametrize("make", [single, blend])
def test_the_order_instant_has_no_index_to_replace(tmp_path, prefixes, make):
    dataset = make(prefixes, tmp_path / "cache", order="instant")
    name = "shuffle_index" if make is single else "dataset_index"
    before = samples(dataset)
    for value in (None, np.arange(3)):
        with pytest.raises(AttributeError, match=f"{name} needs order='megatron' or 'balanced', found 'instant'"):
            setattr(dataset, name, value)
    assert samples(dataset) == samples(make(prefixes, tmp_path / "cache", order="instant")) == before


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_dataset_can_be_pickled_while_another_thread_reads_its_first_samples(tmp_path, prefixes, order):
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [1, 2]), split="1", order=order)
    failed = []
    for _ in range(30):
        dataset = build(config, (20, None, None))[0]

        def read(dataset=dataset):
            for position in range(3):
                _ = dataset[position], dataset.gather([position])

        reader = threading.Thread(target=read)
        reader.start()
        while reader.is_alive():
            try:
                pickle.dumps(dataset)
            except RuntimeError as error:
                failed.append(error)
        reader.join()
    assert failed == []


@pytest.mark.parametrize("order", ["megatron", "instant"])
@pytest.mark.parametrize("documents", [[-1, 0, 1], [28, 29, 30], [-1, 3, 5], [2, 7, 30]])
def test_a_document_that_the_file_lacks_is_refused(tmp_path, prefixes, documents, order):
    config = gpt_config(tmp_path / "cache", blend=(prefixes[:1], None), split="1", order=order)
    wanted = r"split train: documents must be in \[0, 30\), found (-1|30)$"
    if order == "instant" and np.diff(documents).max() > 1:
        wanted = "consecutive documents"
    with pytest.raises(ArgumentError, match=wanted):
        GPTDataset(IndexedDataset(prefixes[0]), prefixes[0], np.array(documents), 2, Split.train, config)
    assert not list((tmp_path / "cache").rglob("*.npy"))
