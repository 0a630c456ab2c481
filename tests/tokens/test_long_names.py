"""Pairs with long names."""

import json

import numpy as np
import pytest

from tests.support.files.built_pair import build
from trackbed.errors import ArgumentError
from trackbed.preprocess import PreprocessConfig, TrainingConfig, open_tokenizer, preprocess, train_tokenizer
from trackbed.tokens import IndexedDataset
from trackbed.tokens.merge import merge

LONGEST = 255 - len(".trackbed.json.pending")


def run(folder, output, **options):
    (folder / "a.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")
    config = PreprocessConfig(inputs=(folder / "a.jsonl",), output=str(folder / output), **{"workers": 1, **options})
    return preprocess(config, open_tokenizer("bytes"))


@pytest.mark.parametrize("char", ["x", "\u6771"])
def test_a_pair_may_have_the_longest_name_that_its_files_leave(tmp_path, char):
    name = char * (LONGEST // len(char.encode()))
    for _ in range(2):  # the second one replaces the first
        build(tmp_path / name, [[1, 2, 3]], np.uint16)
    assert IndexedDataset(str(tmp_path / name))[0].tolist() == [1, 2, 3]


def test_a_longer_name_is_refused_before_any_work(tmp_path):
    with pytest.raises(ArgumentError, match=r"xxx\.\.\.: the name of a pair must have at most 233 bytes here, so that"):
        build(tmp_path / ("x" * (LONGEST + 1)), [[1]], np.uint16)
    assert list(tmp_path.iterdir()) == []


def test_preprocess_says_so_for_its_output(tmp_path):
    longest = LONGEST - len("_text_document")
    assert run(tmp_path, "x" * longest).records == 1
    with pytest.raises(ArgumentError, match=r"the name of a pair must have at most 233 bytes here, .* found 234"):
        run(tmp_path, "x" * (longest + 1))
    with pytest.raises(ArgumentError, match="the name of a pair must have at most 233 bytes here"):
        run(tmp_path, "x" * longest, shard_bytes=1 << 20)


def test_merging_and_training_write_long_names_too(tmp_path):
    build(tmp_path / "a", [[1, 2, 3]], np.uint16)
    merge([str(tmp_path / "a")], str(tmp_path / ("m" * LONGEST)))
    assert len(IndexedDataset(str(tmp_path / ("m" * LONGEST)))) == 1
    (tmp_path / "a.txt").write_text("some text")
    path = tmp_path / ("t" * 250 + ".json")
    assert train_tokenizer(TrainingConfig(inputs=(tmp_path / "a.txt",), vocab_size=300), path).path == path
