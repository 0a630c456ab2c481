"""SentencePiece and tiktoken."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
import tiktoken

from trackbed.datasets.tokenizers.sentencepiece import SentencePieceTokenizer
from trackbed.datasets.tokenizers.tiktoken import TiktokenTokenizer
from trackbed.errors import ArgumentError
from trackbed.preprocess import open_tokenizer
from trackbed.tokens import IndexedDataset

TEXTS = ["the cat sat on the mat", "", " the  dog\n", "Straße 東京 <s> </s>"]

PLUGIN = """
def tiny():
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks[b"th"], ranks[b"the"] = 256, 257
    specials = {"<|endoftext|>": 258, "<|x|>": 259}
    return {"name": "tiny", "pat_str": r" ?\\w+|\\s+|.", "mergeable_ranks": ranks, "special_tokens": specials}

ENCODING_CONSTRUCTORS = {"tiny": tiny}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of SentencePiece."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "texts.txt").write_text("the cat sat on the mat and the dog ran\n" * 50 + "Straße 東京\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "texts.txt"),
        model_prefix=str(folder / "tiny"),
        vocab_size=60,
        model_type="bpe",
        byte_fallback=False,
        minloglevel=2,
    )
    return folder / "tiny.model"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a plugin of tiktoken's that brings the encoding `tiny`."""
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "tiny_plugin.py").write_text(PLUGIN)
    namespace = {}
    exec(PLUGIN, namespace)
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "tiny", tiktoken.Encoding(**namespace["tiny"]()))
    return tmp_path


def test_a_model_of_sentencepiece_gives_the_librarys_ids(model):
    tokenizer = open_tokenizer(str(model))
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    for text in TEXTS:
        assert tokenizer.tokenize(text).tolist() == library.encode(text)
    assert tokenizer.tokenize_batch(TEXTS) == [library.encode(text) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eod) == (60, library.eos_id())
    assert tokenizer.detokenize(tokenizer.tokenize("the cat")) == "the cat"
    assert tokenizer.vocab["<unk>"] == library.unk_id()


def test_the_piece_that_ends_a_document_may_be_named(model):
    assert open_tokenizer(str(model), eod_token="<s>").eod == 1
    with pytest.raises(ArgumentError, match=r"tiny\.model: the model must have one of the pieces '<end>', found none"):
        open_tokenizer(str(model), eod_token="<end>")


def test_what_is_no_model_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ArgumentError, match=r"a\.model: a tokenizer file must exist, found none"):
        open_tokenizer(str(tmp_path / "a.model"))
    (tmp_path / "a.model").write_bytes(b"nonsense")
    with pytest.raises(ArgumentError, match=r"a\.model: must be a model of SentencePiece: "):
        open_tokenizer(str(tmp_path / "a.model"))


def test_options_that_sentencepiece_would_ignore_are_refused(model):
    with pytest.raises(ArgumentError, match=r"tiny\.model: a SentencePiece model must be used without special_tokens"):
        open_tokenizer(str(model), special_tokens=True)


def test_an_encoding_of_tiktoken_gives_the_librarys_ids(tiny):
    tokenizer = open_tokenizer("tiktoken:tiny")
    library = tiktoken.get_encoding("tiny")
    assert isinstance(tokenizer, TiktokenTokenizer)
    for text in TEXTS:
        assert tokenizer.tokenize(text).tolist() == library.encode_ordinary(text)
    assert tokenizer.tokenize_batch(TEXTS) == [library.encode_ordinary(text) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.vocab["the"]) == (260, 258, 257)
    assert tokenizer.detokenize(np.array([257, 32])) == "the "


def test_special_tokens_of_tiktoken_count_where_they_are_asked_for(tiny):
    for special_tokens in (False, True):
        tokenizer = open_tokenizer("tiktoken:tiny", special_tokens=special_tokens)
        assert (258 in tokenizer.tokenize("a<|endoftext|>b")) is special_tokens
    assert open_tokenizer("tiktoken:tiny", eod_token="<|x|>").eod == 259
    with pytest.raises(ArgumentError, match=r"tiny: the encoding must have '<end>'; .*: '<\|endoftext\|>', '<\|x\|>'"):
        open_tokenizer("tiktoken:tiny", eod_token="<end>")


def test_an_encoding_that_there_is_not_is_an_error_that_names_it():
    with pytest.raises(ArgumentError, match="tiktoken:nonsense: must be an encoding that tiktoken can load: "):
        open_tokenizer("tiktoken:nonsense")


def test_both_go_through_processes(model, tiny):
    (tiny / "a.txt").write_text("the cat")
    (tiny / "b.txt").write_text("the dog")
    tokenizer = open_tokenizer(str(model))
    assert pickle.loads(pickle.dumps(tokenizer)).tokenize_batch(TEXTS) == tokenizer.tokenize_batch(TEXTS)
    for name, wanted in (("tiktoken:tiny", [257, *b" cat"]), (str(model), tokenizer.tokenize("the cat").tolist())):
        program = "import sys; sys.path.insert(0, '.'); from trackbed.cli.main import main; main()"
        options = ["a.txt", "b.txt", "--tokenizer", name, "--output", "out", "--workers", "2"]
        subprocess.run([sys.executable, "-c", program, "preprocess", *options], cwd=tiny, check=True)
        assert IndexedDataset(str(tiny / "out_text_document"))[0].tolist() == wanted


@pytest.mark.parametrize(("library", "name"), [("sentencepiece", "a.model"), ("tiktoken", "tiktoken:gpt2")])
def test_a_library_that_is_missing_is_named_with_what_installs_it(library, name, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    how = r"pip install '\.\[text\]' in Trackbed's clone"
    wanted = rf"{name}: the library {library} must be installed to use this \({how}\)"
    with pytest.raises(ArgumentError, match=wanted):
        open_tokenizer(name)
