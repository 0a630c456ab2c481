"""Errors about files that are no tokenizer of the kind that their name says."""

import base64
import json

import pytest

from tests.support.files.tokenizer_files import byte_level_bpe, write_sentencepiece
from trackbed.blends import read_blend_file
from trackbed.blends.tokenizer import make_tokenizer
from trackbed.datasets import open_tokenizer
from trackbed.errors import ArgumentError, BlendFileError, FormatError
from trackbed.tokens import IndexedDataset

RANKS = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
TEKKEN = {"config": {"pattern": "x"}, "vocab": [{"rank": 0, "token_bytes": "AA==", "token_str": "x"}]}


def error_of(path):
    with pytest.raises(ArgumentError) as caught:
        _ = open_tokenizer(path).eod
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


FILES = {
    "ranks named .model": (
        "tokenizer.model",
        RANKS,
        "must be a model of SentencePiece: found ranks of tiktoken",
    ),
    "ranks": ("cl100k_base.tiktoken", RANKS, "must be a file of Hugging Face tokenizers: found ranks of tiktoken"),
    "ranks named .txt": (
        "ranks.txt",
        RANKS,
        "a WordPiece vocabulary must have [UNK], [CLS], [SEP], found ranks of",
    ),
    "tekken": ("tekken.json", json.dumps(TEKKEN).encode(), "found a tokenizer in Mistral's tekken format"),
    "vocab.json": (
        "vocab.json",
        b'{"a": 0, "b": 1}',
        "found a vocabulary without merges, as GPT-2's vocab.json is",
    ),
    "configuration": (
        "tokenizer_config.json",
        b'{"tokenizer_class": "X"}',
        "found the configuration of a tokenizer or",
    ),
    "model configuration": (
        "config.json",
        b'{"model_type": "llama"}',
        "found the configuration of a tokenizer",
    ),
    "merges": (
        "merges.txt",
        b"#version: 0.2\na b\n",
        "found the merges of a BPE: give tokenizer.json of",
    ),
    "Git LFS": ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid x\n", "found a pointer of Git LFS"),
    "Git LFS model": ("a.model", b"version https://git-lfs.github.com/spec/v1\noid x\n", "found a pointer of Git LFS"),
    "empty": ("tokenizer.json", b"", "found an empty file"),
}


@pytest.mark.parametrize(("name", "raw", "message"), FILES.values(), ids=FILES)
def test_a_file_of_another_kind_is_named_with_the_next_step(tmp_path, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    assert message in error_of(tmp_path / name)


def test_a_model_of_sentencepiece_under_another_name_is_named(tmp_path):
    model = write_sentencepiece(tmp_path / "a.model", "bpe")
    model.rename(tmp_path / "tokenizer.model.v3")
    assert "found what looks like a model of SentencePiece: give it a name that ends in .model" in error_of(
        tmp_path / "tokenizer.model.v3"
    )


def test_a_damaged_file_keeps_the_words_of_its_library(tmp_path):
    (tmp_path / "a.json").write_text('{"version": "1.0", "model": {"type": "BPE"')
    assert error_of(tmp_path / "a.json").startswith("must be a file of Hugging Face tokenizers: EOF while parsing")
    (tmp_path / "a.model").write_bytes(write_sentencepiece(tmp_path / "b.model", "bpe").read_bytes()[:999])
    assert error_of(tmp_path / "a.model").startswith("must be a model of SentencePiece: INTERNAL")


HUB = "a tokenizer of the Hugging Face hub must be downloaded first: hf download "


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B --local-dir FOLDER"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B --local-dir FOLDER"),
        ("gpt2", "gpt2 --local-dir FOLDER"),
        ("https://huggingface.co/gpt2/tokenizer.json", "NAME --local-dir FOLDER"),
    ],
)
def test_a_name_of_a_hub_is_told_to_be_downloaded(tmp_path, monkeypatch, name, way):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="a tokenizer file must exist, found none") as caught:
        open_tokenizer(name)
    assert str(caught.value).endswith(HUB + way)


def test_a_name_of_a_hub_in_a_blend_file_is_told_to_be_downloaded(tmp_path):
    text = 'version = 1\nsequence_length = 8\ntokenizer = "some/model"\nsplit = "1"\n[[dataset]]\npath = "a"\n'
    (tmp_path / "blend.toml").write_text(text)
    with pytest.raises(ArgumentError, match=f"{HUB}some/model"):
        make_tokenizer(read_blend_file(tmp_path / "blend.toml").tokenizer)


@pytest.mark.parametrize("name", ["t.json", "models/t.json", "a.model", "vocab.txt"])
def test_a_file_that_is_not_there_is_not_taken_for_a_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=f"^{name}: a tokenizer file must exist, found none$"):
        open_tokenizer(name)


def folder_error(path):
    return error_of(path).removeprefix("must be a folder with a tokenizer that transformers can read: ")


def test_a_folder_of_gpt2_without_a_configuration_says_what_to_write(tmp_path):
    library = byte_level_bpe(["<|endoftext|>"])
    library.model.save(str(tmp_path))
    message = folder_error(tmp_path)
    assert message.startswith("found vocab.json and merges.txt alone")
    (tmp_path / "tokenizer_config.json").write_text(message.partition("such as ")[2])
    assert open_tokenizer(tmp_path).tokenize("the cat").tolist() == library.encode("the cat").ids


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "found none of the files of a tokenizer, such as tokenizer.json, tokenizer_config.json: give the folder"),
        ({"model.safetensors": b"x"}, "found none of the files of a tokenizer"),
        ({"tokenizer.model": b"version https://git-lfs\n"}, "found a tokenizer.model that holds a pointer of Git LFS"),
        ({"tekken.json": json.dumps(TEKKEN).encode()}, "found a tokenizer in Mistral's tekken format"),
    ],
)
def test_a_folder_without_a_tokenizer_that_is_read_is_told_so(tmp_path, files, message):
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    assert folder_error(tmp_path).startswith(message)


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"])
def test_a_byte_order_mark_in_a_blend_file_is_named(tmp_path, mark):
    (tmp_path / "blend.toml").write_bytes(mark + b"version = 1\n")
    with pytest.raises(BlendFileError, match=r"blend\.toml:1: must be UTF-8 without a byte order mark, found one"):
        read_blend_file(tmp_path / "blend.toml")


def test_an_index_of_an_older_format_is_named(tmp_path):
    (tmp_path / "old.bin").write_bytes(bytes(8))
    (tmp_path / "old.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(80))
    with pytest.raises(
        FormatError, match=r"old\.idx: the magic must be .*, that of fairseq's older format \(cached or lazy\)"
    ):
        IndexedDataset(str(tmp_path / "old"))
