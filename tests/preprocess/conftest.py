"""A small corpus, and a tokenizer trained on similar text."""

import json

import pytest

from trackbed.preprocess import TrainingConfig, train_tokenizer

TEXTS = ["the cat sat on the mat", "  the dog\n\n", "", "Straße 東京 🙂 <|endoftext|> end", "the the the"]


@pytest.fixture
def corpus(tmp_path):
    """Five records: plain, with surrounding white space, empty, in other scripts, and of repeated words."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": text[:3]}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """Byte-level BPE of at most 300 tokens, the first of which is `<|endoftext|>`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "texts.txt").write_text("the cat sat on the mat\n" * 9, encoding="utf-8")
    config = TrainingConfig(inputs=(folder / "texts.txt",), vocab_size=300)
    return train_tokenizer(config, folder / "tokenizer.json").path
