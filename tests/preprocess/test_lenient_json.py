"""Lines that Python's json reads and a strict parser does not: fields that nobody reads cost no record."""

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.preprocess import PreprocessConfig, TrainingConfig, open_tokenizer, preprocess, train_tokenizer
from trackbed.preprocess.lenient_json import MOST_LEVELS, read_object
from trackbed.preprocess.records import RecordError, parse_record

ODD = {
    "NaN": "NaN",
    "infinity": "Infinity",
    "minus infinity": "-Infinity",
    "a large number": "1e400",
    "a small number": "-1e400",
    "an integer of many digits": "9" * 5000,
    "a high surrogate": r'"\ud83d"',
    "a low surrogate": r'"\udc00 and more"',
    "halves in the wrong order": r'"\udc00\ud83d"',
    "a half before another character": r'"\ud83d\u0041"',
    "NaN in a list": "[1, NaN, [Infinity]]",
    "NaN in an object": '{"a": {"b": NaN}}',
    "deep lists": "[" * 2000 + "]" * 2000,
    "deep objects": '{"a": ' * 2000 + "null" + "}" * 2000,
    "deep and mixed": '[1, {"a": ' * 900 + '"x\\n"' + ', "b": 2}, false]' * 900,
    "the deepest": "[" * MOST_LEVELS + "]" * MOST_LEVELS,
    "deep with NaN inside": "[" * 2000 + "NaN" + "]" * 2000,
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize("line", ['{{"score": {}, "text": "a"}}', ' {{ "text" : "a" , "score" : {} }} \r\n'])
def test_an_odd_value_in_another_field_leaves_the_text(value, line):
    assert parse_record(line.format(value).encode(), ["text"]) == ("a",)


def test_the_name_of_another_field_may_be_odd():
    assert parse_record(rb'{"\ud83d": 1, "text": "a"}', ["text"]) == ("a",)


def test_texts_beside_odd_values_stay_as_they_are():
    text = 'caf\u00e9 \U0001f642 "quoted" \\ \n\t \u2028 NaN'
    for line in (
        json.dumps({"text": text, "n": math.nan}),
        json.dumps({"text": text, "n": math.nan}, ensure_ascii=False),
    ):
        assert parse_record(line.encode(), ["text"]) == (text,)


def test_the_last_of_several_fields_of_one_name_counts():
    assert parse_record(b'{"text": NaN, "text": "b"}', ["text"]) == ("b",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": NaN}', "the value of 'text' must be a string, found a number"),
        ('{"text": [NaN]}', "the value of 'text' must be a string, found an array"),
        ('{"text": %s}' % ("[" * 2000 + "]" * 2000), "the value of 'text' must be a string, found an array"),
        ('{"body": "a", "n": NaN}', "a record must have the key 'text', found 'body', 'n'"),
        (r'{"text": "\ud83d"}', "a line must be JSON, found at column 11: no low surrogate in string"),
        (r'{"n": NaN, "text": "\ud83d"}', "the value of 'text' must be text, found half of a surrogate pair, U+D83D"),
        ('{"n": NaN, "text": "a"', "a line must be JSON, found at column 23: Expecting ','"),
        ('{"n": NaN "text": "a"}', "a line must be JSON, found at column 11: Expecting ','"),
        ('{"n": -NaN, "text": "a"}', "a line must be JSON, found at column 7: Expecting value"),
        (
            '{"n": NaN, text: "a"}',
            "a line must be JSON, found at column 12: Expecting property name ",
        ),
        ('{"n": NaN, "text": "a"} {}', "a line must be JSON, found at column 24: Extra data"),
        (
            '{"n": NaN, "text": "a",}',
            "a line must be JSON, found at column 23: Illegal trailing comma"
            if sys.version_info >= (3, 13)
            else "a line must be JSON, found at column 24: Expecting property name ",
        ),
        ("NaN", "a line must be JSON, found at column 1: Expecting '{'"),
        ("[NaN]", "a line must be JSON, found at column 1: Expecting '{'"),
        ('{"n": nan, "text": "a"}', "a line must be JSON, found at column 7: invalid literal"),
        ('{"n": %s, "text": "a"}' % ("[" * 2000 + "]" * 1999), "a line must be JSON, found at column 4014: Expecting"),
        ('{"n": %s, "text": "a"}' % ("[" * 2000 + "}" * 2000), "a line must be JSON, found at column 2007: Expecting"),
        ('{"n": %s, "text": "a"}' % ("[" * (MOST_LEVELS + 1)), "nested deeper than 100,000 levels"),
        ('{"n": NaN, "text": "a\x01"}', "a line must be JSON, found at column 22: Invalid control character at"),
    ],
)
def test_a_line_that_is_bad_all_the_same_says_why(line, reason):
    with pytest.raises(RecordError) as caught:
        parse_record(line.encode(), ["text"])
    assert reason in str(caught.value)


def test_a_byte_that_is_no_utf8_is_named_beside_nan():
    with pytest.raises(RecordError, match="text must be UTF-8, found the byte 0xff at byte 13"):
        parse_record(b'{"n": NaN, "\xff": "a", "text": "a"}', ["text"])


def record_with(values):
    return st.dictionaries(st.text(max_size=5), values, max_size=4)


odd_floats = st.sampled_from([math.nan, math.inf, -math.inf])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | odd_floats | st.text(st.characters(), max_size=8)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | record_with(inner), max_leaves=8)


@given(fields=record_with(trees), text=st.text(max_size=20), odd=odd_floats, is_ascii=st.booleans())
def test_whatever_python_writes_is_read(fields, text, odd, is_ascii):
    line = json.dumps({**fields, "odd": odd, "text": text}, ensure_ascii=is_ascii)
    try:
        encoded = line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair that is not escaped, which a file in UTF-8 cannot have
        with pytest.raises(RecordError, match="must be UTF-8"):
            parse_record(line.encode(errors="surrogatepass"), ["text"])
    else:
        assert parse_record(encoded, ["text"]) == (text,)


@given(text=st.text(st.sampled_from('{}[]",:\\ \n019.eE+-NaInfitytruelsu'), max_size=30))
def test_an_object_is_read_exactly_where_python_reads_one(text):
    try:
        wanted = json.loads(text, parse_int=float)
    except json.JSONDecodeError:
        wanted = None
    try:
        found = read_object(text)
    except json.JSONDecodeError:
        found = None
    assert repr(found) == repr(wanted if isinstance(wanted, dict) else None)


def test_a_corpus_with_scores_keeps_all_of_its_documents(tmp_path):
    records = [{"text": f"document {number}", "score": math.nan if number % 2 else 0.5} for number in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "a"), workers=1)
    report = preprocess(config, open_tokenizer("bytes"))
    assert (report.records, report.bad) == (10, 0)
    trained = train_tokenizer(TrainingConfig(inputs=(tmp_path / "a.jsonl",), vocab_size=300), tmp_path / "t.json")
    assert (trained.records, trained.bad) == (10, 0)
