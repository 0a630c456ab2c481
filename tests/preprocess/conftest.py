"""A small corpus, and a tokenizer that was trained on it."""

import json

import pytest

from trackbed.preprocess import TrainingConfig, train_tokenizer

TEXTS = ["the cat sat on the mat", "  the dog\n\n", "", "Straße 東京 🙂 <|endoftext|> end", "the the the"]


@pytest.fixture
def corpus(tmp_path):
    """Five records: a text, one with white space around it, an empty one, one with other scripts, and a last one."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": text[:3]}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """A byte-level BPE of 300 tokens at most, of which `<|endoftext|>` is the first."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "texts.txt").write_text("the cat sat on the mat\n" * 9, encoding="utf-8")
    config = TrainingConfig(inputs=(folder / "texts.txt",), vocab_size=300)
    return train_tokenizer(config, folder / "tokenizer.json").path
