import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from trackbed.preprocess import open_tokenizer
from trackbed.preprocess.long_text import split_text

WORDS = st.lists(st.sampled_from(["the", "cat", " ", "  ", "\n", "\n\n", "sat", ".", "東京", "x1", "é"]), max_size=60)

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(kind, text):
    """Returns a BPE of some hundred tokens that splits words as well-known tokenizers do."""
    tokenizer = Tokenizer(models.BPE())
    if kind == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "words and line ends":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(CL100K), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif kind == "marks for spaces":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator(text.split("end"), trainer=trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenize(tokenizer_file):
    tokenizer = open_tokenizer(str(tokenizer_file))
    return lambda text: tokenizer.tokenize_batch([text])[0]


@given(text=WORDS.map("".join), part_chars=st.integers(1, 40))
def test_the_tokens_of_the_parts_are_the_tokens_of_the_text(tokenize, text, part_chars):
    parts = list(split_text(text, tokenize, part_chars=part_chars))
    assert "".join(parts) == text
    assert [one for part in parts for one in tokenize(part)] == tokenize(text)


@pytest.mark.parametrize("kind", ["words", "words and line ends", "marks for spaces", "marks without words"])
def test_tokenizers_of_other_kinds_agree_too(kind):
    text = "the cat,  sat\n\n on 12345 mats. don't\r\n東京に、行きました。x_y=1;\n    end " * 40
    tokenizer = trained(kind, text)
    parts = list(split_text(text, lambda part: tokenizer.encode(part).ids, part_chars=100))
    assert len(parts) > 3
    assert [one for part in parts for one in tokenizer.encode(part).ids] == tokenizer.encode(text).ids


def test_a_short_text_is_not_cut_and_an_empty_one_is_one_part():
    assert list(split_text("one two", str.split, part_chars=7)) == ["one two"]
    assert list(split_text("", str.split, part_chars=7)) == [""]


def test_a_long_text_of_words_is_cut_near_every_length_asked_for(tokenize):
    parts = list(split_text("the cat sat on the mat " * 1000, tokenize, part_chars=500))
    assert max(map(len, parts)) < 520


def test_a_text_is_left_whole_where_every_cut_would_change_its_tokens():
    def marks_the_beginning(text):
        return ["<s>", *text.split()]

    text = "the cat sat on the mat " * 100
    assert list(split_text(text, marks_the_beginning, part_chars=50)) == [text]


def test_a_text_without_words_is_left_whole(tokenize):
    assert list(split_text("a" * 1000, tokenize, part_chars=50)) == ["a" * 1000]
