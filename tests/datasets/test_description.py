import json
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.blends import GPTDataset, gpt_config, write_pair
from trackbed.datasets.megatron_dataset import describe
from trackbed.datasets.start import Start, shared
from trackbed.index import Split
from trackbed.index.ranges import number_range
from trackbed.tokens import IndexedDataset

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Described:
    def __init__(self, unique_identifiers):
        self.unique_identifiers = unique_identifiers


@given(st.dictionaries(st.text(), VALUES | st.builds(Described, VALUES), max_size=6))
def test_a_description_is_indented_json(identifiers):
    wanted = json.dumps(OrderedDict(identifiers), indent=4, default=lambda value: value.unique_identifiers)
    assert describe(identifiers.items()) == wanted


def test_what_datasets_share_is_made_once_in_a_start_and_anew_outside():
    made = []

    def make():
        made.append(object())
        return made[-1]

    one, other = object(), object()
    assert shared("a", make, one) is not shared("a", make, one)
    with Start().active():
        assert shared("a", make, one) is shared("a", make, one)
        assert shared("a", make, one) is not shared("a", make, other)
        assert shared("a", make, one, other) is not shared("a", make, one)
        assert shared("a", make, one) is not shared("b", make, one)
    assert shared("a", make, one) is made[-1]


class Twice(GPTDataset):
    """Names an option of the base class once more, and one of the dataset's own."""

    @staticmethod
    def _key_config_attributes():
        return [*GPTDataset._key_config_attributes(), "random_seed", "split"]


class Bare(GPTDataset):
    @staticmethod
    def _key_config_attributes():
        return []


@pytest.mark.parametrize("cls", [GPTDataset, Twice, Bare])
@pytest.mark.parametrize("is_block", [False, True])
def test_a_dataset_is_described_as_it_was_when_it_was_made(tmp_path, cls, is_block):
    write_pair(tmp_path / "a", [10] * 9, seed=1)
    config = gpt_config(None, blend=([f"{tmp_path}/a"], None), split="1")
    config.path_to_cache = f"{tmp_path}/cache"
    with Start().active() if is_block else nullcontext():
        datasets = [
            cls(IndexedDataset(f"{tmp_path}/a"), f"{tmp_path}/a", number_range(0, 9), number, Split.train, config)
            for number in (1, 2)
        ]
    config.random_seed += 1
    for dataset in datasets:
        assert dataset.unique_identifiers["num_samples"] == dataset.num_samples
        assert dataset.unique_identifiers.get("random_seed", 0) != config.random_seed
        assert dataset.unique_description == json.dumps(
            dataset.unique_identifiers, indent=4, default=lambda value: value.unique_identifiers
        )


class Shortened(GPTDataset):
    """Changes what it was given, for one split; and names by instance what belongs to its identity."""

    def __init__(self, dataset, prefix, indices, num_samples, split, config):
        config = replace(config, sequence_length=3) if split is Split.valid else config
        self.is_valid = split is Split.valid
        super().__init__(dataset, prefix, indices, num_samples, split, config)

    def _key_config_attributes(self):
        return [*GPTDataset._key_config_attributes(), *(["eod_mask_loss"] if self.is_valid else [])]


def test_in_a_block_a_subclass_may_still_change_its_configuration_and_identity(tmp_path):
    write_pair(tmp_path / "a", [10] * 9, seed=1)
    config = gpt_config(tmp_path / "cache", blend=([f"{tmp_path}/a"], None), split="1")
    found = []
    for block in (nullcontext(), Start().active()):
        with block:
            datasets = [
                Shortened(IndexedDataset(f"{tmp_path}/a"), f"{tmp_path}/a", number_range(0, 9), 2, split, config)
                for split in (Split.train, Split.valid)
            ]
            found.append([dataset.unique_description for dataset in datasets])
    assert found[0] == found[1]
    assert '"sequence_length": 3' in found[0][1]
    assert ["eod_mask_loss" in text for text in found[0]] == [False, True]
