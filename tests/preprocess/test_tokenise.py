import os

import numpy as np
import pytest
import tokenizers

from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import open_tokenizer
from trackbed.preprocess.chunks import plan_chunks
from trackbed.preprocess.inputs import find_inputs
from trackbed.preprocess.records import BadRecord
from trackbed.preprocess.tokenise_chunk import ChunkTokenizer, TokenisedSegment


def tokenise(path, tokenizer, *, keys=("text",), append_eod=False, skip_bad=False, dtype=np.uint16, **options):
    (chunk,) = plan_chunks(find_inputs([path]).files, chunk_bytes=1 << 20, max_record_bytes=1 << 20)
    work = ChunkTokenizer(
        tokenizer=tokenizer,
        keys=keys,
        dtype=np.dtype(dtype),
        eod=tokenizer.eod if append_eod else None,
        skip_bad=skip_bad,
        max_record_bytes=1 << 20,
        **options,
    )
    return work(chunk)


@pytest.fixture
def lines(tmp_path):
    def write(*records):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(record + "\n" for record in records))
        return path

    return write


def test_documents_are_one_behind_the_other_in_the_dtype_of_the_file(lines):
    (found,) = tokenise(lines('{"text": "ab"}', '{"text": "c"}'), ByteTokenizer()).keys
    assert found.tokens.dtype == np.uint16
    assert found.tokens.tolist() == [97, 98, 99]
    assert found.lengths.tolist() == [2, 1]


def test_the_end_of_a_document_follows_only_documents_that_have_tokens(lines):
    (found,) = tokenise(lines('{"text": "ab"}', '{"text": ""}'), ByteTokenizer(), append_eod=True).keys
    assert found.tokens.tolist() == [97, 98, 256]
    assert (found.lengths.tolist(), found.dropped) == ([3], 1)


def test_of_several_keys_a_text_without_tokens_is_a_sequence_without_text(lines):
    path = lines('{"text": "", "title": "a"}', '{"text": "b", "title": ""}')
    text, title = tokenise(path, ByteTokenizer(), keys=("text", "title")).keys
    assert (text.tokens.tolist(), text.lengths.tolist(), text.dropped, text.empty) == ([98], [0, 1], 0, 1)
    assert (title.tokens.tolist(), title.lengths.tolist(), title.dropped, title.empty) == ([97], [1, 0], 0, 1)


def test_a_bad_record_gives_no_key_a_document(lines):
    path = lines('{"text": "a", "title": "b"}', '{"text": "c"}')
    found = tokenise(path, ByteTokenizer(), keys=("text", "title"), skip_bad=True)
    assert [key.lengths.tolist() for key in found.keys] == [[1], [1]]
    reason = "a record must have the key 'title', found 'text'"
    assert found.segments == (TokenisedSegment(2, 0, 2, (BadRecord(1, reason),)),)


def test_nothing_behind_the_first_bad_record_is_looked_at_unless_bad_ones_are_skipped(lines):
    path = lines('{"text": "a"}', "bad", '{"text": "c"}', "bad")
    strict, lenient = (tokenise(path, ByteTokenizer(), skip_bad=skip) for skip in (False, True))
    assert (strict.segments[0].lines, [one.line for one in strict.segments[0].bad]) == (2, [1])
    assert (lenient.segments[0].lines, [one.line for one in lenient.segments[0].bad]) == (4, [1, 3])


def test_a_text_that_the_tokenizer_refuses_is_a_bad_record_and_its_neighbours_are_not(lines, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<eod>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<eod>"])
    words.save(str(tmp_path / "words.json"))
    path = lines('{"text": "a b"}', '{"text": "c"}', '{"text": "b"}')
    found = tokenise(path, open_tokenizer(str(tmp_path / "words.json")), skip_bad=True)
    assert found.keys[0].tokens.tolist() == [0, 1, 1]
    ((bad,),) = (segment.bad for segment in found.segments)
    assert bad.line == 1
    assert bad.reason.startswith("the tokenizer must accept the text, found an error: ")


def test_one_record_with_two_texts_that_are_refused_is_one_bad_record(lines):
    class Refuses(ByteTokenizer):
        def tokenize_batch(self, texts):
            raise ValueError("no")

    path = lines('{"text": "a", "title": "b"}')
    found = tokenise(path, Refuses(), keys=("text", "title"), skip_bad=True)
    assert found.segments[0].bad == (BadRecord(0, "the tokenizer must accept the text, found an error: no"),)


def test_an_id_beyond_the_dtype_is_refused_and_not_wrapped(lines):
    class Lies(ByteTokenizer):
        def tokenize_batch(self, texts):
            return [[70_000] for _ in texts]

    found = tokenise(lines('{"text": "a"}'), Lies(), skip_bad=True)
    assert "found 70000" in found.segments[0].bad[0].reason


def test_a_text_that_is_tokenised_in_parts_has_the_same_tokens(tokenizer_file, lines):
    tokenizer = open_tokenizer(str(tokenizer_file))
    path = lines('{"text": "' + "the cat sat on the mat " * 200 + '"}', '{"text": "the end"}')
    whole = tokenise(path, tokenizer, append_eod=True).keys[0]
    parts = tokenise(path, tokenizer, append_eod=True, part_chars=100).keys[0]
    assert whole.tokens.tolist() == parts.tokens.tolist()
    assert whole.lengths.tolist() == parts.lengths.tolist()


@pytest.mark.parametrize("before", [None, "true"])
def test_the_setting_of_the_tokenizers_library_is_put_back(lines, monkeypatch, before):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    tokenise(lines('{"text": "a"}'), ByteTokenizer())
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


class AtStops:
    """Splits at every full stop."""

    def split(self, text):
        return [f"{part}." for part in text.split(".")[:-1]]


@pytest.mark.parametrize("part_chars", [1, 3, 5, 1 << 20])
@pytest.mark.parametrize("append_eod", [False, True])
def test_long_texts_of_sentences_have_the_tokens_of_short_ones(lines, part_chars, append_eod):
    path = lines('{"text": "ab cd.e.fgh ij kl.m."}', '{"text": ""}', '{"text": "n."}')
    options = {"splitter": AtStops(), "append_eod": append_eod, "part_chars": part_chars}
    (found,) = tokenise(path, ByteTokenizer(), **options).keys
    end = [256] if append_eod else []
    assert found.tokens.tolist() == [*b"ab cd.e.fgh ij kl.m.", *end, *b"n.", *end]
    assert found.lengths.tolist() == [6, 2, 10, 2 + len(end), 2 + len(end)]
    assert (found.counts.tolist(), found.dropped) == ([4, 1], 1)
