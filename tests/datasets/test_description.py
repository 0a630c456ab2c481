import json
from collections import OrderedDict
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blends import GPTDataset, gpt_config, write_pair
from trackbed.datasets.description import alike, being_alike, describe
from trackbed.index import Split
from trackbed.index.runs import run
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


def test_what_is_alike_is_made_once_in_a_block_and_anew_outside():
    made = []

    def make():
        made.append(object())
        return made[-1]

    one, other = object(), object()
    assert alike(make, one) is not alike(make, one)
    with being_alike():
        assert alike(make, one) is alike(make, one)
        assert alike(make, one) is not alike(make, other)
        assert alike(make, one, other) is not alike(make, one)
    assert alike(make, one) is made[-1]


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
    with being_alike() if is_block else nullcontext():
        datasets = [
            cls(IndexedDataset(f"{tmp_path}/a"), f"{tmp_path}/a", run(0, 9), number, Split.train, config)
            for number in (1, 2)
        ]
    config.random_seed += 1
    for dataset in datasets:
        assert dataset.unique_identifiers["num_samples"] == dataset.num_samples
        assert dataset.unique_identifiers.get("random_seed", 0) != config.random_seed
        assert dataset.unique_description == json.dumps(
            dataset.unique_identifiers, indent=4, default=lambda value: value.unique_identifiers
        )
