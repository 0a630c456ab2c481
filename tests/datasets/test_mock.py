import pytest

from tests.support.files.blends import build, gpt_config, tokens_of, write_pairs
from trackbed.datasets import GPTDataset, MockGPTDataset, NullTokenizer
from trackbed.datasets.mock import MockGPTLowLevelDataset
from trackbed.errors import ArgumentError, PlanError


class Small(MockGPTLowLevelDataset):
    """A few made-up documents."""

    size = 50
    max_sequence_length = 30


class SmallMock(MockGPTDataset):
    """Over a few made-up documents."""

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return Small(config.tokenizer)


def test_made_up_documents_count_up_and_end():
    low_level = Small(NullTokenizer(5))
    document = low_level[3]
    assert len(document) == low_level.sequence_lengths[3]
    assert document[-1] == 5
    assert document[:-1].tolist() == [(place + 1) % 6 for place in range(len(document) - 1)]
    assert low_level.get(3, offset=1, length=2).tolist() == document[1:3].tolist()


def test_made_up_datasets_need_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, valid, test = build(gpt_config(None), (20, 5, 5), cls=SmallMock)
    assert len(train) >= 20
    assert tokens_of(train, [0]) != tokens_of(valid, [0])
    assert len(test) >= 5
    assert not list(tmp_path.iterdir())


def test_made_up_datasets_can_be_cached(tmp_path):
    first = build(gpt_config(tmp_path / "cache"), (20, 5, 5), cls=SmallMock)[0]
    again = build(gpt_config(tmp_path / "cache"), (20, 5, 5), cls=SmallMock)[0]
    assert tokens_of(first, range(5)) == tokens_of(again, range(5))
    assert list((tmp_path / "cache").glob("*document_index.npy"))


def test_a_mock_over_real_data_is_refused(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path, 1), None), split="1")
    with pytest.raises(ArgumentError, match="without blend"):
        build(config, (5, None, None), cls=MockGPTDataset)


def test_a_class_that_needs_files_cannot_make_its_data_up():
    with pytest.raises(PlanError, match="failed to build as a mock data generator"):
        build(gpt_config(None), (5, 5, 5), cls=GPTDataset)
