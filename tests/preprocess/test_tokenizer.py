import sys

import pytest
import tokenizers

from trackbed.errors import ArgumentError
from trackbed.preprocess import FlatTokenizer, open_fastest_tokenizer, open_tokenizer


def test_bytes_is_the_name_of_the_byte_tokenizer():
    assert open_tokenizer("bytes").tokenize("hi").tolist() == [104, 105]


def test_any_other_name_is_a_file(tokenizer_file):
    tokenizer = open_tokenizer(str(tokenizer_file))
    assert tokenizer.detokenize(tokenizer.tokenize("the cat 東京")) == "the cat 東京"
    with pytest.raises(ArgumentError, match=r"byte\.json: a tokenizer file must exist, found none"):
        open_tokenizer("byte.json")


@pytest.mark.parametrize("options", [{"eod_token": "x"}, {"special_tokens": True}])
def test_the_byte_tokenizer_refuses_options_that_it_would_ignore(options):
    with pytest.raises(ArgumentError, match="the tokenizer 'bytes' must be used without options"):
        open_tokenizer("bytes", **options)


def test_an_end_of_document_token_that_is_not_there_is_an_error_with_those_that_are(tokenizer_file):
    with pytest.raises(ArgumentError, match=r"'<end>'; its special tokens: '<\|endoftext\|>'"):
        open_tokenizer(str(tokenizer_file), eod_token="<end>")


def test_a_file_that_says_how_to_cut_and_fill_texts_for_a_model_does_neither(tokenizer_file, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    library.enable_truncation(2)
    library.enable_padding(length=4)
    library.save(str(tmp_path / "cuts.json"))
    tokenizer = open_tokenizer(str(tmp_path / "cuts.json"))
    for text in ("the", "the cat sat on the mat"):
        wanted = open_tokenizer(str(tokenizer_file)).tokenize(text).tolist()
        assert tokenizer.tokenize(text).tolist() == wanted
        assert list(tokenizer.tokenize_batch([text])[0]) == wanted


def test_the_fastest_tokenizer_gives_the_ids_of_the_others(tokenizer_file, caplog):
    fastest = open_fastest_tokenizer(str(tokenizer_file))
    assert isinstance(fastest, FlatTokenizer)
    texts = ["the cat", "", "<|endoftext|> 東京"]
    assert fastest.tokenize_batch(texts) == open_tokenizer(str(tokenizer_file)).tokenize_batch(texts)
    assert open_fastest_tokenizer("bytes").tokenize("hi").tolist() == [104, 105]
    assert caplog.messages == []


def test_without_the_fast_library_a_message_says_so_and_the_other_is_used(tokenizer_file, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = open_fastest_tokenizer(str(tokenizer_file))
    assert not isinstance(tokenizer, FlatTokenizer)
    (message,) = caplog.messages
    assert message.startswith(f"{tokenizer_file}: using tokenizers instead of the much faster fastokens")
    assert message.endswith("fastokens is not installed (pip install '.[text]' in Trackbed's clone)")
