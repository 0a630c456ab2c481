"""Panics of libraries in Rust: each makes the record bad at which it happens."""

import asyncio
import json

import numpy as np
import pytest
from tiktoken import registry

from tests.support.files.built_pair import build
from tests.support.hostile.rust_panics import PANICS_AT, encoding_with_a_hole, panic, panicking_tokenizer
from trackbed.datasets.tokenizers.rust_libraries import is_panic, panics_as_errors
from trackbed.errors import ArgumentError, FormatError, TrackbedError
from trackbed.preprocess import (
    PreprocessConfig,
    TrainingConfig,
    first_documents,
    open_fastest_tokenizer,
    open_tokenizer,
    preprocess,
)
from trackbed.preprocess.chunks import plan_chunks
from trackbed.preprocess.inputs import find_inputs
from trackbed.preprocess.tokenise_chunk import ChunkTokenizer
from trackbed.preprocess.train_tokenizer import _Corpus
from trackbed.tokens import IndexedDataset

TEXTS = [*["fine"] * 5, "rare \U0010fffd", *["fine"] * 5]


@pytest.fixture
def hole(monkeypatch):
    monkeypatch.setitem(registry.ENCODINGS, "hole", encoding_with_a_hole())
    return open_tokenizer("tiktoken:hole")


def corpus_of(folder, texts, **more):
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))
    return path


def run(path, tokenizer, *, splitter=None, **options):
    config = PreprocessConfig(inputs=(path,), output=str(path.with_name("out")), **{"workers": 1, **options})
    return preprocess(config, tokenizer, splitter=splitter)


def test_a_panic_of_tiktoken_names_file_and_line(tmp_path, hole):
    with pytest.raises(FormatError, match=r"a\.jsonl:6: the tokenizer must accept the text, found an error: "):
        run(corpus_of(tmp_path, TEXTS), hole)


def test_a_panic_of_tiktoken_costs_one_record(tmp_path, hole):
    report = run(corpus_of(tmp_path, TEXTS), hole, skip_bad=True, append_eod=True)
    assert (report.records, report.bad, len(IndexedDataset(str(tmp_path / "out_text_document")))) == (11, 1, 10)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_panic_in_a_worker_is_a_bad_record_too(tmp_path, hole, skip_bad):
    path = corpus_of(tmp_path, TEXTS)
    if skip_bad:
        assert run(path, hole, workers=2, chunk_bytes=20, skip_bad=True).bad == 1
        return
    with pytest.raises(FormatError, match=r"a\.jsonl:6: "):
        run(path, hole, workers=2, chunk_bytes=20)


def test_a_file_at_which_its_own_library_panics_is_opened_and_its_text_a_bad_record(tmp_path, caplog):
    panicking_tokenizer().save(str(tmp_path / "t.json"))
    tokenizer = open_fastest_tokenizer(str(tmp_path / "t.json"))
    assert any("tokenizers fails at one of the texts" in message for message in caplog.messages)
    assert run(corpus_of(tmp_path, ["fine", PANICS_AT, "fine"]), tokenizer, skip_bad=True).bad == 1
    with pytest.raises(FormatError, match=r"a\.jsonl:2: the tokenizer must accept the text"):
        run(corpus_of(tmp_path, ["fine", PANICS_AT, "fine"]), tokenizer)


def test_a_folder_at_which_its_own_library_panics_is_opened(tmp_path):
    panicking_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    assert open_tokenizer(tmp_path).eod == 0


def test_a_text_that_panics_among_several_keys_costs_its_record(tmp_path, hole):
    report = run(corpus_of(tmp_path, TEXTS, title="fine"), hole, json_keys=("title", "text"), skip_bad=True)
    assert report.bad == 1
    assert [output.documents for output in report.outputs] == [10, 10]


def test_a_long_text_that_panics_is_a_bad_record(tmp_path, hole):
    path = corpus_of(tmp_path, ["fine", "fine " * 20 + TEXTS[5]])
    (chunk,) = plan_chunks(find_inputs([path]).files, chunk_bytes=1 << 20, max_record_bytes=1 << 20)
    options = {"keys": ("text",), "dtype": np.dtype("u2"), "eod": None, "skip_bad": True, "max_record_bytes": 1 << 20}
    found = ChunkTokenizer(tokenizer=hole, part_chars=30, **options)(chunk)
    assert [one.line for one in found.segments[0].bad] == [1]


class PanickingSplitter:
    """A splitter of one's own that a library in Rust fails in."""

    def split(self, text):
        if "rare" in text:
            panic()
        return [text]


def test_a_panic_of_a_splitter_is_a_bad_record(tmp_path):
    path = corpus_of(tmp_path, TEXTS)
    with pytest.raises(FormatError, match=r"a\.jsonl:6: the splitter must accept the text, found an error"):
        run(path, open_tokenizer("bytes"), splitter=PanickingSplitter())
    assert run(path, open_tokenizer("bytes"), splitter=PanickingSplitter(), skip_bad=True).bad == 1


def panics_at_the_rare(text):
    if "rare" in text:
        panic()
    return [text]


def test_a_panic_while_a_tokenizer_is_trained_is_a_bad_record(tmp_path):
    long = TEXTS[5] * 20_000  # only long texts are cut with the library
    corpus_of(tmp_path, [*["fine"] * 5, long, "fine"])
    files = find_inputs([tmp_path / "a.jsonl"]).files
    skipping = _Corpus(files, TrainingConfig(inputs=(tmp_path,), skip_bad=True), panics_at_the_rare, None)
    assert (len(list(skipping.texts())), skipping.records, skipping.bad) == (6, 7, 1)
    strict = _Corpus(files, TrainingConfig(inputs=(tmp_path,)), panics_at_the_rare, None)
    with pytest.raises(FormatError, match=r"a\.jsonl:6: the tokenizer must accept the text"):
        list(strict.texts())


class PanickingDecoder:
    vocab_size = 10

    def detokenize(self, ids):
        panic()


def test_a_panic_while_documents_are_shown_names_the_document(tmp_path):
    build(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(FormatError, match=r"the tokenizer must decode document 0, found an error: a panic of the lib"):
        first_documents(str(tmp_path / "a"), PanickingDecoder(), num_documents=1, max_tokens=5)


def test_an_encoding_of_tiktoken_that_panics_while_it_is_made_is_an_error(monkeypatch):
    monkeypatch.setattr(registry, "ENCODING_CONSTRUCTORS", {"made": panic})
    with pytest.raises(ArgumentError, match="tiktoken:made: must be an encoding that tiktoken can load: a panic"):
        open_tokenizer("tiktoken:made")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, MemoryError])
def test_ends_of_a_program_are_no_bad_records(tmp_path, error):
    class Ending:
        eod, vocab_size = 0, 256

        def tokenize_batch(self, texts):
            raise error

    with pytest.raises(error):
        run(corpus_of(tmp_path, TEXTS), Ending(), skip_bad=True)


def test_only_panics_are_converted():
    with pytest.raises(RuntimeError, match="a panic of the library: index out of bounds"), panics_as_errors():
        panic()
    for error in (KeyboardInterrupt("x"), SystemExit(3), ValueError("y"), TrackbedError("z")):
        assert not is_panic(error)
        with pytest.raises(type(error)) as found, panics_as_errors():
            raise error
        assert found.value is error
