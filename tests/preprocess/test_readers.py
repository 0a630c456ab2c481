import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import FormatError
from trackbed.preprocess.chunks import plan_chunks
from trackbed.preprocess.inputs import InputSegment, find_inputs
from trackbed.preprocess.records import BadRecord, RecordError, TextRecord, parse_record, read_lines, read_segment

LIMIT = 1 << 20


def segments_of(path, chunk_bytes=1 << 20):
    chunks = plan_chunks(find_inputs([path]).files, chunk_bytes=chunk_bytes, max_record_bytes=LIMIT)
    return [segment for chunk in chunks for segment in chunk.segments]


def records_of(path, keys=("text",)):
    (segment,) = segments_of(path)
    return list(read_segment(segment, keys=keys, max_record_bytes=LIMIT))


@given(
    raw=st.lists(st.sampled_from([b"\n", b"\r", b"a", b"bc", b"\xc2\x85", b"\xe2\x80\xa8"]), max_size=40).map(b"".join),
    chunk_bytes=st.integers(1, 50),
)
def test_however_a_file_is_cut_its_lines_are_those_between_line_feeds(tmp_path, raw, chunk_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw)
    found = [line for segment in segments_of(path, chunk_bytes) for line in read_lines(segment, max_bytes=LIMIT)]
    *whole, rest = raw.split(b"\n")
    assert found == [line + b"\n" for line in whole] + ([rest] if rest else [])


def test_a_segment_inside_a_long_line_has_no_lines_and_reads_no_further(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 100 + b"\nlast\n")
    found = [list(read_lines(segment, max_bytes=LIMIT)) for segment in segments_of(path, 20)]
    assert found == [[b"x" * 100 + b"\n"], [], [], [], [], [b"last\n"]]


def test_a_line_with_a_carriage_return_or_a_unicode_line_end_inside_is_one_record(tmp_path):
    text = "a\r\nb\u2028c\u0085d\x0b\x0ce"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert records_of(path) == [TextRecord(0, (text,))]


def test_blank_lines_are_no_records_and_count_as_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n \t\r\n{"text": "x"}\n')
    assert records_of(path) == [None, None, TextRecord(2, ("x",))]


@pytest.mark.parametrize("raw", ['[{"text": "x"}]', '\n [\n{"text": "x"},\n{"text": "y"}\n]\n'])
def test_an_array_in_the_place_of_lines_is_named_with_a_command_that_converts_it(tmp_path, raw):
    wanted = "a file of JSON lines must hold one JSON record per line, found an array; `jq -c '.[]'{}` converts it"
    for name, content in (("a b.json", raw.encode()), ("c.jsonl.gz", gzip.compress(raw.encode()))):
        (tmp_path / name).write_bytes(content)
        bad = [record for record in records_of(tmp_path / name) if isinstance(record, BadRecord)]
        assert bad[0].reason == wanted.format("" if name.endswith(".gz") else f" '{tmp_path}/a b.json'")
        assert bad[1:] == [] or "found an array;" not in bad[1].reason


def test_an_array_after_a_record_is_a_line_of_its_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n[1]\n')
    assert records_of(tmp_path / "a.jsonl")[1] == BadRecord(1, "a line must be a JSON object, found an array")


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\x00", "<|endoftext|>", "e\u0301", "\ufeffx"])
def test_texts_stay_as_they_are(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n")
    assert records_of(path) == [TextRecord(0, (text,))]


def test_a_plain_text_is_one_record_with_its_byte_order_mark_and_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n")
    assert records_of(path) == [TextRecord(0, ("\ufeffone\r\ntwo\n\n",))]


def test_a_byte_that_is_no_utf8_is_found_with_its_line_in_a_plain_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo \xff\n")
    (found,) = records_of(path)
    assert found == BadRecord(1, "text must be UTF-8, found the byte 0xff at byte 5 of the line (invalid start byte)")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "x\xff"}', "text must be UTF-8, found the byte 0xff at byte 12 of the line (invalid start byte)"),
        (b'["text"]', "a line must be a JSON object, found an array"),
        (b'"text"', "a line must be a JSON object, found a string"),
        (b"{}", "a record must have the key 'text', found no key"),
        (b'{"body": "x", "id": 1}', "a record must have the key 'text', found 'body', 'id'"),
        (b'{"text": null}', "the value of 'text' must be a string, found null"),
        (b'{"text": 1.5}', "the value of 'text' must be a string, found a number"),
        (b'{"text": true}', "the value of 'text' must be a string, found a boolean"),
        (b'{"text": {}}', "the value of 'text' must be a string, found an object"),
        (b'{"text": ["x"]}', "the value of 'text' must be a string, found an array"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(line, reason):
    with pytest.raises(RecordError) as caught:
        parse_record(line, ["text"])
    assert str(caught.value) == reason


@pytest.mark.parametrize("line", [b'{"text": "x"', b"nonsense", b'{"text": "\\ud800"}', b'{"text": "x\x00"}', b"{} {}"])
def test_a_line_that_is_no_json_says_at_which_column(line):
    with pytest.raises(RecordError, match=r"^a line must be JSON, found at column \d+: \w+"):
        parse_record(line, ["text"])


def test_of_many_keys_a_few_are_listed():
    line = json.dumps({f"k{number}": "" for number in range(100)}).encode()
    with pytest.raises(RecordError, match=r"'k7' and 92 more$"):
        parse_record(line, ["text"])


def test_a_byte_order_mark_before_the_first_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\n{"text": "y"}\n')
    bad, good = records_of(path)
    assert "must not begin with a byte order mark" in bad.reason
    assert good == TextRecord(1, ("y",))


def test_a_file_that_changes_between_the_plan_and_the_reading_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n")
    (segment,) = segments_of(path)
    path.write_bytes(b"{}\n{}\n")
    with pytest.raises(FormatError, match=r"a\.jsonl: a file must keep its 3 bytes while it is read, found 6"):
        list(read_lines(segment, max_bytes=LIMIT))
    text = tmp_path / "a.txt"
    text.write_bytes(b"abc")
    (file,) = find_inputs([text]).files
    text.write_bytes(b"ab")
    with pytest.raises(FormatError, match="3 bytes while it is read, found 2"):
        list(read_segment(InputSegment(file, 0, 3), keys=["text"], max_record_bytes=LIMIT))
