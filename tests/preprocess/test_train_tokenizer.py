import json

import pytest
import tokenizers

from trackbed.errors import ArgumentError, FormatError
from trackbed.preprocess import TrainingConfig, open_tokenizer, train_tokenizer


def train(folder, *names, **options):
    config = TrainingConfig(inputs=tuple(folder / name for name in names), **{"vocab_size": 300, **options})
    return train_tokenizer(config, folder / "tokenizer.json")


def test_the_tokenizer_writes_any_text_and_reads_it_back(corpus, tmp_path):
    train(tmp_path, "corpus.jsonl")
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in ["the cat", " \n", "\x00\x01", "東京 🙂", "<|endoftext|>"]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_words_that_are_frequent_become_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("banana " * 100)
    found = train(tmp_path, "a.txt")
    vocab = tokenizers.Tokenizer.from_file(str(found.path)).get_vocab()
    assert "banana" in vocab
    assert found.vocab_size == len(vocab) <= 300


def test_special_tokens_come_first_and_end_documents_by_default(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    train(tmp_path, "a.txt", special_tokens=("<pad>", "</s>"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab["<pad>"], tokenizer.eod) == (0, 1)


def test_the_same_texts_give_the_same_file(corpus, tmp_path):
    first = train(tmp_path, "corpus.jsonl").path.read_bytes()
    assert train(tmp_path, "corpus.jsonl").path.read_bytes() == first


def test_all_keys_are_learnt_from_and_bad_records_can_be_left_out(tmp_path):
    lines = [json.dumps({"a": "banana", "b": "cherry"})] * 50
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "bad"]))
    with pytest.raises(FormatError, match=r"a\.jsonl:51: a line must be JSON"):
        train(tmp_path, "a.jsonl", json_keys=("a", "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    found = train(tmp_path, "a.jsonl", json_keys=("a", "b"), skip_bad=True)
    assert (found.records, found.bad) == (51, 1)
    assert {"banana", "cherry"} <= open_tokenizer(str(found.path)).vocab.keys()


def test_a_long_text_is_learnt_from_in_parts(tmp_path):
    (tmp_path / "a.txt").write_text("banana cherry " * 50_000)
    assert "\u0120cherry" in open_tokenizer(str(train(tmp_path, "a.txt").path)).vocab


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 10**12}, "vocab_size must be at most 16,777,216, found 1,000,000,000,000"),
        ({"vocab_size": 256}, "vocab_size must be at least 257 for the bytes and special tokens, found 256"),
        ({"special_tokens": ("",)}, "special_tokens must be different and not empty"),
        ({"special_tokens": ("a", "a")}, "special_tokens must be different and not empty"),
        ({"json_keys": ()}, "json_keys must name at least one key"),
    ],
)
def test_a_field_out_of_its_range_is_refused(corpus, tmp_path, options, message):
    with pytest.raises(ArgumentError) as caught:
        train(tmp_path, "corpus.jsonl", **options)
    assert str(caught.value).startswith(message)


def test_without_inputs_or_texts_or_an_output_folder_there_is_no_training(corpus, tmp_path):
    with pytest.raises(ArgumentError, match="inputs must name at least one"):
        train(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ArgumentError, match=r"a\.txt: a tokenizer needs texts to learn from, found none"):
        train(tmp_path, "a.txt")
    config = TrainingConfig(inputs=(corpus,))
    with pytest.raises(ArgumentError, match="gone: the folder of the output must exist"):
        train_tokenizer(config, tmp_path / "gone" / "tokenizer.json")


def test_progress_ends_at_the_size_of_the_input(corpus, tmp_path):
    seen = []
    config = TrainingConfig(inputs=(corpus,), vocab_size=300)
    train_tokenizer(config, tmp_path / "t.json", progress=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (corpus.stat().st_size, corpus.stat().st_size)
