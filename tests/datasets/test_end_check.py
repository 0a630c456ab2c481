"""The warning about data in which no document ends with the token that options look for."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trackbed
from tests.support.files.blends import EOD, VOCAB, build, gpt_config
from tests.support.files.built_pair import build as write_documents
from tests.support.files.indexed_pair import Pair
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.comm import run_ranks
from trackbed.datasets import GPTDataset, NullTokenizer
from trackbed.datasets.end_check import check_document_ends, last_tokens
from trackbed.errors import TrackbedError

OPTIONS = ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"]


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="trackbed.datasets.end_check")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "trackbed.datasets.end_check"]


def write(prefix, ends, *, dtype=np.uint16):
    write_documents(prefix, [[1, 2, 3, end] for end in ends], dtype)
    return str(prefix)


def config_of(tmp_path, prefixes, **options):
    options = {"reset_position_ids": True, "blend": (prefixes, None), "split": "1", **options}
    return gpt_config(tmp_path / "cache", **options)


@pytest.mark.parametrize("option", OPTIONS)
def test_data_that_end_with_another_token_are_told_with_both_ids(tmp_path, warnings, option):
    config = config_of(tmp_path, [write(tmp_path / "a", [7] * 9)], **{"reset_position_ids": False, option: True})
    build(config, (4, 0, 0))
    (message,) = warnings()
    assert message.startswith(f"{tmp_path}/a: {option} must find the end-of-document token {EOD} ")
    assert "none of the first 8 documents of 1 pair ends with it (most end with 7)" in message


def test_one_document_with_the_token_is_enough(tmp_path, warnings):
    pairs = [write(tmp_path / "a", [7] * 9), write(tmp_path / "b", [7, 7, EOD])]
    build(config_of(tmp_path, pairs), (4, 0, 0))
    assert warnings() == []


def test_without_the_options_nothing_is_looked_at(tmp_path, warnings):
    build(config_of(tmp_path, [write(tmp_path / "a", [7] * 9)], reset_position_ids=False), (4, 0, 0))
    assert warnings() == []


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_blend_that_is_opened_by_name_is_looked_at_once(tmp_path, warnings, order):
    pairs = [write(tmp_path / name, [7] * 40) for name in "abc"]
    text = f"""
version = 1
sequence_length = 8
order = "{order}"
split = "1"
tokenizer = {{eod = {EOD}, vocab_size = {VOCAB + 1}}}
cache = "cache"
size = {{train = 12}}
options = {{reset_attention_mask = true, eod_mask_loss = true}}
"""
    text += "".join(f'[[dataset]]\npath = "{pair}"\nweight = 1\n' for pair in pairs)
    (tmp_path / "blend.toml").write_text(text)
    trackbed.open_blend(tmp_path / "blend.toml")
    (message,) = warnings()
    assert "reset_attention_mask and eod_mask_loss must find the end-of-document token" in message
    assert "of the first 24 documents of 3 pairs" in message


def test_blends_of_each_split_and_groups_of_pairs_are_looked_at(tmp_path, warnings):
    pairs = [write(tmp_path / name, [5] * 9) for name in "abc"]
    blends = {"blend": None, "split": None, "blend_per_split": [(["g"], None), ([pairs[2]], None), None]}
    check_document_ends(config_of(tmp_path, [], **blends, groups={"g": pairs[:2]}))
    (message,) = warnings()
    assert "of 3 pairs" in message


def test_at_most_eight_pairs_are_read_and_none_is_mapped(tmp_path, warnings):
    pairs = [write(tmp_path / f"{number:02}", [7]) for number in range(12)]
    for pair in pairs[8:]:
        write(pair, [EOD])
    check_document_ends(config_of(tmp_path, pairs))
    (message,) = warnings()
    assert "of the first 8 documents of 8 pairs" in message
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_pairs_in_object_stores_are_left_out(tmp_path, warnings):
    pairs = ["s3://bucket/a", write(tmp_path / "a", [7])]
    check_document_ends(config_of(tmp_path, pairs, object_storage_cache_path=str(tmp_path), mmap_bin_files=False))
    (message,) = warnings()
    assert message.startswith(f"{tmp_path}/a: ")


def test_the_first_rank_alone_warns(tmp_path, warnings):
    config = config_of(tmp_path, [write(tmp_path / "a", [7] * 9)])

    def open_rank(group):
        BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config, group=group).build()

    run_ranks(3, open_rank)
    assert len(warnings()) == 1


@pytest.mark.parametrize(
    ("lengths", "borders", "tokens"),
    [
        ([], [0], []),
        ([0, 0], [0, 1, 2], []),
        ([2, 0], [0, 0, 2], [1, 2]),
        ([3], [0, 1], [1]),
        ([2], [0, 9], [1, 2]),
        ([2], [0, -1, 1], [1, 2]),
        ([-3], [0, 1], [1, 2]),
    ],
    ids=["no document", "empty", "empty last", "short .bin", "border outside", "falling borders", "negative length"],
)
def test_odd_pairs_are_left_out_without_an_error(tmp_path, warnings, lengths, borders, tokens):
    Pair(tmp_path / "a", lengths=lengths, borders=borders, tokens=tokens, dtype="uint16").write()
    check_document_ends(config_of(tmp_path, [str(tmp_path / "a"), str(tmp_path / "missing")]))
    assert warnings() == []


@pytest.mark.parametrize("change", ["pointers", "cut", "other", "modes", "folder"])
def test_damaged_pairs_are_left_to_the_errors_of_their_opening(tmp_path, warnings, change):
    pair = Pair(tmp_path / "a", lengths=[2, 2], borders=[0, 1, 2], tokens=[1, 2, 3, 4], dtype="uint16")
    if change == "pointers":
        pair.pointers = [2**63 - 1, -(2**63)]
    if change == "modes":
        pair.modes = [0, 1]
    pair.write()
    if change == "cut":
        pair.idx.write_bytes(pair.idx.read_bytes()[:50])
    if change == "other":
        pair.idx.write_bytes(b"TNTIDX\0\0" * 9)
    if change == "folder":
        pair.bin.unlink()
        pair.bin.mkdir()
    check_document_ends(config_of(tmp_path, [str(pair.prefix)]))
    assert warnings() == []


def test_a_tokenizer_without_an_end_of_documents_is_not_looked_at(tmp_path, warnings):
    class Endless(NullTokenizer):
        @property
        def eod(self):
            raise NotImplementedError

    check_document_ends(config_of(tmp_path, [write(tmp_path / "a", [7])], tokenizer=Endless(VOCAB)))
    assert warnings() == []


def test_the_last_sentence_of_a_document_counts(tmp_path):
    Pair(tmp_path / "a", lengths=[1, 2, 2], borders=[0, 2, 3], tokens=[1, 2, 3, 4, 5], dtype="uint16").write()
    assert last_tokens(str(tmp_path / "a")) == [3, 5]


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3), max_size=12),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]),
)
def test_the_last_tokens_are_those_of_the_first_documents(tmp_path, documents, dtype):
    sequences = [sequence for document in documents for sequence in document]
    borders = np.cumsum([0, *map(len, documents)]).tolist()
    lengths, tokens = list(map(len, sequences)), [token for sequence in sequences for token in sequence]
    Pair(tmp_path / "a", lengths=lengths, borders=borders, tokens=tokens, dtype=dtype).write()
    expected = [document[-1][-1] for document in documents[:8] if document and document[-1]]
    assert last_tokens(str(tmp_path / "a")) == expected


@given(raw=st.binary(max_size=120))
def test_no_content_of_an_index_is_an_error(tmp_path, raw):
    pair = Pair(tmp_path / "a", lengths=[2, 2], borders=[0, 1, 2], tokens=[1, 2, 3, 4], dtype="uint16").write()
    pair.idx.write_bytes(raw if len(raw) % 2 else pair.encode()[:17] + raw)
    try:
        check_document_ends(config_of(tmp_path, [str(pair.prefix)]))
    except TrackbedError as error:
        pytest.fail(str(error))
