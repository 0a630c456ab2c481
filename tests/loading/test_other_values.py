"""Positions over other files and other values: the same samples resume, and what differs is named."""

import json
import shutil

import pytest

from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.blends import StatedTokenizer
from trackbed.datasets import GPTDataset, MegatronIdentity
from trackbed.errors import ArgumentError
from trackbed.loading import BatchStream, MegatronPretrainingRandomSampler, MegatronPretrainingSampler

IDENTITY = MegatronIdentity("a.Tokenizer", "path", {})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    write_pairs(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dataset_of(folder):
    def make(place="first", *, num=2, size=50, weights=None, cls=GPTDataset, **options):
        blend = ([f"{place}/pair{number}" for number in range(num)], weights or [1.0 / num] * num)
        config = gpt_config(folder / "cache", **{"blend": blend, "split": "9,1", **options})
        return build(config, (size, 2, None), cls)[0]

    return make


def loader_of(dataset):
    fingerprint = dataset.fingerprint
    return BatchStream(dataset, MegatronPretrainingSampler(len(dataset), 0, 4, 0, 1, fingerprint=fingerprint))


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_copies_of_files_in_another_folder_resume(dataset_of, num, order):
    first, second = (dataset_of(place, num=num, order=order) for place in ("first", "second"))
    assert first.fingerprint != second.fingerprint
    loader = loader_of(first)
    next(iter(loader))
    other = loader_of(second)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other))["tokens"].tolist() == [first[position]["tokens"].tolist() for position in range(4, 8)]
    shuffled = MegatronPretrainingRandomSampler(first, len(first), 8, 4, 0, 1, data_sharding=False)
    MegatronPretrainingRandomSampler(second, len(second), 0, 4, 0, 1, data_sharding=False).load_state_dict(
        shuffled.state_dict()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sequence_length": 8}, r"sequence_length: 16, now 8"),
        ({"random_seed": 8}, "random_seed: 7, now 8"),
        ({"split": "8,2"}, r"documents: \[\[0, 27\], \[0, 54\]\], now \[\[0, 24\], \[0, 48\]\]"),
        ({"weights": [0.25, 0.75]}, r"weights: \[0.5, 0.5\], now \[0.25, 0.75\]"),
        ({"num": 1}, "num_datasets: 2, now 1"),
        ({"num": 3}, "num_datasets: 2, now 3"),
        ({"size": 40}, "size: 50, now 40"),
        ({"order": "balanced"}, 'order: "megatron", now "balanced"'),
        ({"eod_mask_loss": True}, "eod_mask_loss: false, now true"),
        ({"reset_position_ids": True}, "reset_position_ids: false, now true"),
    ],
)
def test_a_value_that_differs_is_named(dataset_of, options, said):
    loader = loader_of(dataset_of())
    other = loader_of(dataset_of("second", **options))
    with pytest.raises(ArgumentError, match=f"the samples that it was trained on, found others: .*{said}"):
        other.load_state_dict(loader.state_dict())
    assert other.state_dict()["consumed_samples"] == 0


def test_files_that_were_rewritten_are_named_as_data(dataset_of, folder):
    loader = loader_of(dataset_of())
    shutil.copytree(folder / "first", folder / "second", dirs_exist_ok=True)
    for end in ("bin", "idx"):
        shutil.copy(folder / "first" / f"pair2.{end}", folder / "second" / f"pair1.{end}")
    with pytest.raises(ArgumentError, match="data: "):
        loader_of(dataset_of("second")).load_state_dict(loader.state_dict())


def test_a_position_says_what_decides_its_samples(dataset_of):
    content = json.loads(loader_of(dataset_of()).state_dict()["content"])
    assert content["sequence_length"] == 16
    assert content["weights"] == [0.5, 0.5]
    assert "first" not in json.dumps(content)


def test_files_of_equal_lengths_are_told_apart_by_name_and_by_tokens(dataset_of, folder):
    for name, seed in (("even0", 0), ("even1", 1)):
        write_pair(folder / "first" / name, [20] * 60, seed=seed)
    write_pair(folder / "second" / "even0", [20] * 60, seed=2)

    def blend(*pairs):
        return dataset_of(blend=([f"{pair}" for pair in pairs], [0.5] * len(pairs)))

    state = loader_of(blend("first/even0", "first/even1")).state_dict()
    for others, said in (
        (("first/even1", "first/even0"), r'name: \["even0", "even1"\], now \["even1", "even0"\]'),
        (("second/even0", "first/even1"), "found others: tokens: "),
    ):
        with pytest.raises(ArgumentError, match=said):
            loader_of(blend(*others)).load_state_dict(state)
    loader_of(blend("first/even0", "first/even1")).load_state_dict(state)


def test_tokens_that_were_rewritten_in_place_are_noticed(dataset_of, folder):
    write_pair(folder / "first" / "even", [20] * 60, seed=0)
    options = {"blend": (["first/even"], None), "size": None}
    state = loader_of(dataset_of(**options)).state_dict()
    write_pair(folder / "first" / "even", [20] * 60, seed=1)
    with pytest.raises(ArgumentError, match="found others: tokens: "):
        loader_of(dataset_of(**options)).load_state_dict(state)


def test_a_tokenizer_with_another_end_of_documents_is_noticed(dataset_of):
    state = loader_of(
        dataset_of(tokenizer=StatedTokenizer(eod=3, vocab_size=200, megatron_identity=IDENTITY))
    ).state_dict()
    other = dataset_of(tokenizer=StatedTokenizer(eod=4, vocab_size=200, megatron_identity=IDENTITY))
    with pytest.raises(ArgumentError, match="eod: 3, now 4"):
        loader_of(other).load_state_dict(state)


def test_classes_of_others_are_compared_by_fingerprint_alone(dataset_of):
    class Other(GPTDataset):
        def __getitem__(self, idx):
            return super().__getitem__(idx)

    first, second = (dataset_of(place, cls=Other) for place in ("first", "second"))
    assert "content" not in loader_of(first).state_dict()
    with pytest.raises(ArgumentError, match="only with the saved fingerprint"):
        loader_of(second).load_state_dict(loader_of(first).state_dict())


@pytest.mark.parametrize("num", [1, 2])
def test_a_run_in_the_order_instant_can_be_made_longer(dataset_of, num):
    loader = loader_of(dataset_of(order="instant", num=num))
    next(iter(loader))
    longer = dataset_of(order="instant", num=num, size=90)
    other = loader_of(longer)
    other.load_state_dict(loader.state_dict())
    read = [tokens.tolist() for batch in other for tokens in batch["tokens"]]
    assert read == tokens_of(longer, range(4, 88))
    assert read[:46] == tokens_of(dataset_of(order="instant", num=num), range(4, 50))
    shorter = loader_of(dataset_of(order="instant", num=num, size=20))
    with pytest.raises(ArgumentError, match=r"consumed_samples must be in \[0, 20\], found 40"):
        shorter.load_state_dict({**loader.state_dict(), "consumed_samples": 40})


def test_a_state_put_together_from_two_is_not_believed(dataset_of):
    old, new = (loader_of(dataset_of(random_seed=seed)).state_dict() for seed in (7, 8))
    without = {name: value for name, value in old.items() if name != "content"}
    with pytest.raises(ArgumentError, match="only with the saved fingerprint"):
        loader_of(dataset_of(random_seed=8)).load_state_dict({**new, **without})


@pytest.mark.parametrize("content", [None, "", "[]", "{", 7, b"x"])
def test_a_damaged_content_is_refused(dataset_of, content):
    state = {**loader_of(dataset_of()).state_dict(), "content": content}
    with pytest.raises(ArgumentError, match=r"found others|saved fingerprint"):
        loader_of(dataset_of("second")).load_state_dict(state)
