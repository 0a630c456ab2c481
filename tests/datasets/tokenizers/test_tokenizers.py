import pickle

import numpy as np
import pytest
import tokenizers

from trackbed.datasets import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    MegatronIdentity,
    MegatronTokenizer,
    NullTokenizer,
)
from trackbed.errors import ArgumentError


@pytest.fixture
def path(tmp_path):
    """A byte-level BPE with two special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox"] * 5, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


class Bare(MegatronTokenizer):
    """A tokenizer that does the least."""

    def tokenize(self, text):
        return np.array([len(text)])

    vocab = property(lambda self: {"a": 0})
    inv_vocab = property(lambda self: {0: "a"})
    vocab_size = property(lambda self: 1)


@pytest.mark.parametrize("name", ["cls", "sep", "pad", "eod", "bos", "eos", "mask"])
def test_what_a_tokenizer_does_not_have_says_so(name):
    with pytest.raises(NotImplementedError, match=f"Bare has no '{name}'"):
        getattr(Bare(), name)


def test_paths_and_options_identify_a_tokenizer():
    assert Bare("a", "b", lower=True).unique_identifiers == {
        "class": "Bare",
        "tokenizer_path": ["a", "b"],
        "lower": "True",
    }


def test_text_that_reads_like_a_special_token_is_plain_text(path):
    plain, special = HuggingFaceTokenizer(path), HuggingFaceTokenizer(path, special_tokens=True)
    assert plain.eod not in plain.tokenize("fox</s>fox")
    assert special.eod in special.tokenize("fox</s>fox")
    assert plain.detokenize(plain.tokenize("fox</s>fox")) == "fox</s>fox"


def test_text_stays_plain_in_another_process(path):
    again = pickle.loads(pickle.dumps(HuggingFaceTokenizer(path)))
    assert again.eod not in again.tokenize("fox</s>fox")


def test_a_batch_is_each_of_its_texts(path):
    tokenizer = HuggingFaceTokenizer(path)
    texts = ["the fox", "", " \n", "quick</s>"]
    assert tokenizer.tokenize_batch(texts) == [tokenizer.tokenize(text).tolist() for text in texts]


def test_a_tokenizer_without_the_wanted_token_lists_those_it_has(path):
    with pytest.raises(ArgumentError, match="must have one of '<eod>'; its special tokens: '<pad>', '</s>'"):
        HuggingFaceTokenizer(path, eod_token="<eod>")


def test_padding_is_what_was_said_or_missing(path):
    assert HuggingFaceTokenizer(path, pad_token="<pad>").pad == 0
    with pytest.raises(NotImplementedError):
        _ = HuggingFaceTokenizer(path).pad


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"x\.json: must be a file of Hugging Face tokenizers"):
        HuggingFaceTokenizer(tmp_path / "x.json")
    with pytest.raises(ArgumentError, match="found none"):
        HuggingFaceTokenizer(tmp_path / "y.json")


def test_bytes_come_back_as_text():
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.tokenize("naïve"), tokenizer.eod, *tokenizer.tokenize("x")]
    assert tokenizer.detokenize(np.array(ids)) == "naïve<eod>x"
    assert tokenizer.vocab_size == len(tokenizer.vocab) == 257


def test_a_null_tokenizer_reads_numbers():
    tokenizer = NullTokenizer(10)
    assert tokenizer.tokenize("3 1 4").tolist() == [3, 1, 4]
    assert (tokenizer.eod, tokenizer.vocab_size) == (10, 11)


def test_an_identity_is_what_megatron_core_hashes():
    identity = MegatronIdentity("package.module.Class", "path", {"vocab_size": 10})
    assert list(NullTokenizer(10, megatron_identity=identity).unique_identifiers.items()) == [
        ("class", "package.module.Class"),
        ("tokenizer_path", "path"),
        ("vocab_size", "10"),
    ]
