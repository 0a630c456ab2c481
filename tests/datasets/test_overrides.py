"""Methods of Megatron Core's classes that a subclass may override: each is called, or refused by name."""

import pickle

import numpy as np
import pytest
import torch

from tests.support.files.blends import build, gpt_config, write_pair
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import BlendedDataset, GPTDataset, MockGPTDataset
from trackbed.datasets.low_level import IndexedDataset
from trackbed.errors import ArgumentError, OversampleError

# Methods of megatron-core 0.16.1's classes, but for the constructors.
CALLED = [
    (GPTDataset, "numel_low_level_dataset"),
    (GPTDataset, "build_low_level_dataset"),
    (GPTDataset, "_key_config_attributes"),
    (GPTDataset, "__len__"),
    (GPTDataset, "__getitem__"),
    (GPTDataset, "_query_document_sample_shuffle_indices"),
    (GPTDataset, "_build_document_sample_shuffle_indices"),
]
REFUSED = [
    (GPTDataset, "_get_num_tokens_per_epoch"),
    (GPTDataset, "_get_num_epochs"),
    (BlendedDataset, "_build_indices"),
    (BlendedMegatronDatasetBuilder, "_build_blended_dataset_splits"),
    (BlendedMegatronDatasetBuilder, "_build_megatron_datasets_parallel"),
    (BlendedMegatronDatasetBuilder, "_build_megatron_dataset_splits"),
    (BlendedMegatronDatasetBuilder, "build_generic_dataset"),
]


class Reversed(GPTDataset):
    """Samples in the opposite order."""

    def _build_document_sample_shuffle_indices(self):
        documents, rows, shuffle = super()._build_document_sample_shuffle_indices()
        return documents, rows, shuffle[::-1]


@pytest.fixture
def config(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20] * 60)
    return gpt_config(tmp_path / "cache", blend=([prefix], None), split="8,1,1")


@pytest.mark.parametrize(("base", "name"), CALLED, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_that_is_overridden_is_called(base, name, config):
    calls = []
    original = vars(base).get(name) or getattr(base, name)

    def method(*arguments):
        calls.append(arguments)
        function = original.__func__ if isinstance(original, staticmethod) else original
        return function(*arguments)

    is_static = name in ("numel_low_level_dataset", "build_low_level_dataset", "_key_config_attributes")
    derived = type("Derived", (base,), {name: staticmethod(method) if is_static else method})
    train = build(config, cls=derived)[0]
    assert len(train)
    assert len(train[0]["tokens"]) == 16
    assert calls


@pytest.mark.parametrize(("base", "name"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_that_is_never_called_is_refused_by_name(base, name, config):
    derived = type("Derived", (base,), {name: lambda *arguments: None})
    make = {
        GPTDataset: lambda: build(config, cls=derived),
        BlendedDataset: lambda: derived(build(config)[:1], [1.0], 5, config),
        BlendedMegatronDatasetBuilder: lambda: derived(GPTDataset, [5, 5, 5], lambda: True, config),
    }
    with pytest.raises(ArgumentError, match=rf"^Derived\.{name} must not be overridden, because it is never called: "):
        make[base]()


def test_an_order_of_its_own_is_that_of_samples_and_batches(config):
    plain, changed = build(config)[0], build(config, cls=Reversed)[0]
    assert len(changed) == len(plain)
    last = len(plain) - 1
    wanted = [plain[last - position]["tokens"].tolist() for position in range(len(plain))]
    assert [changed[position]["tokens"].tolist() for position in range(len(plain))] == wanted
    assert changed.gather(np.arange(len(plain)))["tokens"].tolist() == wanted
    assert pickle.loads(pickle.dumps(changed))[0]["tokens"].tolist() == wanted[0]


def test_the_order_instant_has_no_indices_to_build(tmp_path):
    prefix = write_pair(tmp_path / "pair", [20] * 60)
    instant = gpt_config(tmp_path / "cache", blend=([prefix], None), split="8,1,1", order="instant")
    with pytest.raises(ArgumentError, match=r"Reversed\._build_document_sample_shuffle_indices needs order='megatron'"):
        build(instant, cls=Reversed)


def test_pairs_are_datasets_of_torch(tmp_path, config):
    train = build(config)[0]
    assert isinstance(train.dataset, torch.utils.data.Dataset)
    copied = pickle.loads(pickle.dumps(train.dataset))
    assert type(copied) is IndexedDataset
    assert copied[3].tolist() == train.dataset[3].tolist()
    prefixes = [write_pair(tmp_path / name, [9, 9]) for name in "ab"]
    grouped = gpt_config(tmp_path / "cache", blend=(["both"], None), split="1", groups={"both": prefixes})
    group = GPTDataset.build_low_level_dataset("both", grouped)
    assert all(isinstance(member, torch.utils.data.Dataset) for member in group.members)


def test_a_pair_is_opened_in_the_place_of_another(tmp_path):
    first, other = write_pair(tmp_path / "a", [9] * 3), write_pair(tmp_path / "b", [7] * 5, seed=1)
    dataset = IndexedDataset(first)
    assert len(dataset[0]) == 9
    dataset.initialize(other, False, False, None)
    assert (len(dataset), len(dataset[0]), dataset.mmap) == (5, 7, False)
    assert dataset[4].tolist() == IndexedDataset(other)[4].tolist()
    with pytest.raises(ArgumentError, match="object_storage_config must be an ObjectStorageConfig"):
        dataset.initialize(other, False, False, object())


def test_mock_datasets_may_be_derived_from():
    class Derived(MockGPTDataset):
        pass

    train = build(gpt_config(None), cls=Derived)[0]
    assert len(train[0]["tokens"]) == 16


def test_an_oversampled_blend_is_an_error_of_both_kinds():
    assert issubclass(OversampleError, IndexError)
    assert issubclass(OversampleError, RuntimeError)
