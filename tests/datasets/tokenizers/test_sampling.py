"""Tokenizers that draw tokens at random: switched off with a message, or refused."""

import json
import random

import numpy as np
import pytest
import tokenizers

from tests.support.files.tokenizer_files import SCRIPTS, byte_level_bpe, write_sentencepiece
from trackbed.blends.blend_file import TokenizerEntry
from trackbed.blends.tokenizer import make_tokenizer
from trackbed.datasets import HuggingFaceTokenizer, TransformersTokenizer, open_tokenizer
from trackbed.datasets.tokenizers.sampling import check_repeatable, switch_off_sampling
from trackbed.errors import ArgumentError
from trackbed.preprocess import PreprocessConfig, open_fastest_tokenizer, preprocess

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
OFF = "is switched off: the same text must have the same tokens in every run"


def library_of(dropout):
    library = byte_level_bpe(["<unk>", "<|endoftext|>"])
    library.model.dropout = dropout
    return library


def write_file(path, dropout):
    library_of(dropout).save(str(path))
    return path


def write_folder(path, dropout, *, with_transformers=False):
    path.mkdir()
    write_file(path / "tokenizer.json", dropout)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if with_transformers:
        (path / "config.json").write_text("{}")
    return path


def messages_about(caplog):
    return [message for message in caplog.messages if OFF in message]


@pytest.mark.parametrize("dropout", [0.3, 1e-3, 1.0])
def test_the_dropout_of_a_file_is_switched_off_with_a_message(tmp_path, caplog, dropout):
    found = open_tokenizer(write_file(tmp_path / "t.json", dropout))
    assert messages_about(caplog) == [f"{tmp_path}/t.json: dropout {dropout:g} of its model {OFF}"]
    wanted = library_of(None).encode(TEXT).ids
    assert {tuple(found.tokenize(TEXT).tolist()) for _ in range(9)} == {tuple(wanted)}


@pytest.mark.parametrize("dropout", [0.0, None])
def test_a_dropout_of_nothing_is_accepted_without_a_message(tmp_path, caplog, dropout):
    found = open_fastest_tokenizer(str(write_file(tmp_path / "t.json", dropout)))
    assert found.tokenize(TEXT).tolist() == library_of(None).encode(TEXT).ids
    assert caplog.messages == []


@pytest.mark.parametrize("with_transformers", [False, True])
def test_the_dropout_of_a_folder_is_switched_off_too(tmp_path, caplog, with_transformers):
    found = open_tokenizer(write_folder(tmp_path / "t", 0.4, with_transformers=with_transformers))
    assert isinstance(found, HuggingFaceTokenizer)
    assert messages_about(caplog)
    assert found.tokenize(TEXT).tolist() == library_of(None).encode(TEXT).ids


def test_the_fastest_library_takes_over_what_is_switched_off(tmp_path, caplog):
    found = open_fastest_tokenizer(str(write_file(tmp_path / "t.json", 0.4)))
    assert list(found.tokenize_batch([TEXT])[0]) == library_of(None).encode(TEXT).ids
    assert len(caplog.messages) == 1


def test_the_tokenizer_of_a_blend_samples_nothing(tmp_path, caplog):
    found = make_tokenizer(TokenizerEntry(file=str(write_file(tmp_path / "t.json", 0.4))))
    assert found.tokenize(TEXT).tolist() == library_of(None).encode(TEXT).ids
    assert messages_about(caplog)


def test_the_fingerprint_is_that_of_the_file_without_dropout(tmp_path):
    found = [open_tokenizer(write_file(tmp_path / f"{number}.json", rate)) for number, rate in enumerate([0.4, None])]
    assert found[0].fingerprint == found[1].fingerprint


def test_two_runs_of_one_command_write_the_same_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 5)
    name = str(write_file(tmp_path / "t.json", 0.3))
    for output in "ab":
        config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / output), workers=1)
        preprocess(config, open_fastest_tokenizer(name))
    first, second = ((tmp_path / f"{output}_text_document.bin").read_bytes() for output in "ab")
    assert first == second


def test_sampling_of_a_unigram_model_is_switched_off(caplog):
    scores = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5)]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, 0, byte_fallback=False))
    library.model.alpha, library.model.nbest_size = 0.1, 5
    switch_off_sampling(library, where="t")
    assert {tuple(library.encode("ab" * 9).ids) for _ in range(20)} == {(3,) * 9}
    assert len(messages_about(caplog)) == 2


def write_slow_folder(path, settings):
    path.mkdir()
    write_sentencepiece(path / "spiece.model", control_symbols=[], user_defined_symbols=[])
    config = {"tokenizer_class": "BertGenerationTokenizer", "sp_model_kwargs": settings}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("alpha", [0.01, 0.9])
def test_sampling_of_sentencepiece_in_a_folder_is_switched_off(tmp_path, caplog, alpha):
    settings = {"enable_sampling": True, "nbest_size": -1, "alpha": alpha}
    found = open_tokenizer(write_slow_folder(tmp_path / "sampling", settings))
    plain = open_tokenizer(write_slow_folder(tmp_path / "plain", {}))
    assert isinstance(found, TransformersTokenizer)
    assert [f"{tmp_path}/sampling: enable_sampling of sp_model_kwargs {OFF}"] == [*{*messages_about(caplog)}]
    for text in (TEXT, *SCRIPTS):
        assert found.tokenize(text).tolist() == plain.tokenize(text).tolist()


class OwnTokenizer:
    """A tokenizer of one's own; `draw` may change the ids of a batch."""

    eod, vocab_size = 256, 257

    def __init__(self, draw):
        self.draw = draw

    def tokenize_batch(self, texts):
        return [self.draw(list(text.encode())) for text in texts]


class OwnArrays(OwnTokenizer):
    """The same with arrays."""

    def tokenize_flat(self, texts):
        found = self.tokenize_batch(texts)
        return np.concatenate(found).astype(np.int64), np.cumsum([0, *map(len, found)])


def drop_some(ids):
    return [one for one in ids if random.random() > 0.02]


def drop_one_place(ids):
    return ids[1:] if random.random() < 0.5 else ids


def drop_seeded(ids):
    draw = random.Random(len(ids))
    return [one for one in ids if draw.random() > 0.1]


def run_own(tmp_path, tokenizer, **options):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 20)
    config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "a"), **{"workers": 1, **options})
    return preprocess(config, tokenizer)


@pytest.mark.parametrize("kind", [OwnTokenizer, OwnArrays])
@pytest.mark.parametrize("draw", [drop_some, drop_one_place])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_tokenizer_of_ones_own_that_samples_is_refused(tmp_path, kind, draw, skip_bad):
    expected = rf"^the tokenizer {kind.__name__}: the same text must have the same tokens each time, found different on"
    with pytest.raises(ArgumentError, match=expected):
        run_own(tmp_path, kind(draw), skip_bad=skip_bad)
    assert not (tmp_path / "a_text_document.bin").exists()


def test_it_is_refused_in_a_worker_and_in_shards_too(tmp_path):
    with pytest.raises(ArgumentError, match="the same text must have the same tokens each time"):
        run_own(tmp_path, OwnTokenizer(drop_some), workers=2, chunk_bytes=2000)
    sampling = OwnTokenizer(drop_some)
    sampling.fingerprint = "own"
    with pytest.raises(ArgumentError, match="the same text must have the same tokens each time"):
        run_own(tmp_path, sampling, shard_bytes=3000)


@pytest.mark.parametrize("kind", [OwnTokenizer, OwnArrays])
def test_a_tokenizer_of_ones_own_that_draws_the_same_each_time_is_accepted(tmp_path, kind):
    assert run_own(tmp_path, kind(drop_seeded)).records == 20


def test_a_subclass_of_a_tokenizer_of_trackbed_is_looked_at(tmp_path):
    class Sampling(HuggingFaceTokenizer):
        def tokenize_batch(self, texts):
            return [drop_some(ids) for ids in super().tokenize_batch(texts)]

    with pytest.raises(ArgumentError, match="the tokenizer Sampling: the same text"):
        run_own(tmp_path, Sampling(write_file(tmp_path / "t.json", None)))


def test_a_tokenizer_that_fails_at_a_text_is_left_to_the_record(tmp_path):
    def refuse(_ids):
        raise LookupError("no")

    check_repeatable(lambda texts: [refuse(text) for text in texts], where="t")
    assert run_own(tmp_path, OwnTokenizer(refuse), skip_bad=True, allow_empty=True).bad == 20
