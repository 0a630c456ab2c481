import numpy as np
import pytest
from hypothesis import given

from tests.support.files.blends import build, gpt_config, write_pair, write_pairs
from tests.support.files.generated import builder_of, configurations
from tests.support.files.tidy import remove_folder
from tests.support.tiers import with_files
from trackbed.datasets import MockGPTDataset
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.loading import provenance
from trackbed.tokens import IndexedDataset


def text_of(found):
    """Tokens of a provenance, read from the pairs that it names."""
    pieces = [IndexedDataset(one.prefix)[one.document][one.start : one.stop] for one in found.origins]
    return np.concatenate(pieces).astype(np.int64).tolist()


def assert_is_of(found, sample):
    """Asserts that the sample begins with the text of its provenance."""
    text = text_of(found)
    tokens = sample["tokens"].tolist()
    assert tokens[: len(text)] == text[: len(tokens)]
    assert sample["labels"].tolist()[: len(text) - 1] == text[1:]


@given(case=configurations(("megatron", "balanced", "instant")))
@with_files
def test_the_named_documents_contain_the_sample(tmp_path, case):
    remove_folder(tmp_path / "case")
    case.write(tmp_path / "case" / "data")
    try:
        built = builder_of(case, tmp_path / "case" / "data", tmp_path / "case" / "cache").build()
    except (ArgumentError, TrackbedError):
        return
    for dataset in built:
        if dataset is None or isinstance(dataset, list) or len(dataset) == 0:
            continue
        for position in {0, len(dataset) // 2, -1}:
            found, sample = provenance(dataset, position), dataset[position]
            assert found.dataset == sample.get("dataset_id")
            assert all(one.start < one.stop for one in found.origins)
            assert_is_of(found, sample)


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_document_of_a_group_is_named_by_the_pair_that_contains_it(tmp_path, order):
    parts, other = write_pairs(tmp_path), write_pair(tmp_path / "other", [20] * 50, seed=9)
    config = gpt_config(
        tmp_path / "cache", blend=(["group", other], [0.7, 0.3]), split="8,1,1", groups={"group": parts}, order=order
    )
    dataset = build(config, (300, 10, 10))[0]
    seen = set()
    for position in range(len(dataset)):
        found = provenance(dataset, position)
        assert found.prefix in ("group", other)
        seen |= {one.prefix for one in found.origins}
        assert_is_of(found, dataset[position])
    assert seen == {*parts, other}


def test_the_sample_of_a_blend_is_numbered_in_its_dataset(tmp_path):
    dataset = build(gpt_config(None, blend=(write_pairs(tmp_path), [3, 2, 1]), split="1"), (50, None, None))[0]
    for position in (0, 7, 49):
        found = provenance(dataset, position)
        assert (found.position, found.dataset) == (position, dataset.dataset_index[position])
        assert found.sample == dataset.dataset_sample_index[position]
        assert found.prefix == dataset.datasets[found.dataset].dataset_path
        assert provenance(dataset.datasets[found.dataset], found.sample).origins == found.origins


def test_a_position_out_of_range_is_an_index_error(tmp_path):
    prefixes = write_pairs(tmp_path)
    for order in ("megatron", "instant"):
        config = gpt_config(None, blend=(prefixes, [3, 2, 1]), split="1", order=order)
        dataset = build(config, (50, None, None))[0]
        for one in (dataset, dataset.datasets[0]):
            with pytest.raises(IndexError):
                provenance(one, len(one))


def test_documents_of_a_mock_dataset_have_numbers_too(tmp_path):
    (train, _, _) = build(gpt_config(None, sequence_length=512), (20, 5, 5), cls=MockGPTDataset)
    found = provenance(train, 3)
    assert found.prefix == "None"
    text = np.concatenate([train.dataset.get(one.document, one.start, one.stop - one.start) for one in found.origins])
    assert text[:-1].tolist() == train[3]["tokens"].tolist()


def test_other_datasets_are_refused():
    with pytest.raises(ArgumentError, match="dataset must be a GPTDataset or a blend of them, found a list"):
        provenance([1], 0)
