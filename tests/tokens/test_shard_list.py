import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens.shard_list import is_shard_list, parse_shard_list, read_shard_list, shard_list_text

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


def test_one_key_is_a_list_at_the_top(tmp_path):
    text = shard_list_text({"text": ["c-00000-of-00002_text_document", "c-00001-of-00002_text_document"]})
    assert tomllib.loads(text) == {"group": ["c-00000-of-00002_text_document", "c-00001-of-00002_text_document"]}
    (tmp_path / "c.toml").write_text(text)
    assert read_shard_list(tmp_path / "c.toml") == [
        str(tmp_path / f"c-0000{number}-of-00002_text_document") for number in range(2)
    ]


@given(st.dictionaries(NAMES, st.lists(NAMES, min_size=1, max_size=3), min_size=2, max_size=3))
def test_several_keys_are_tables_whatever_their_names(groups):
    found = parse_shard_list(shard_list_text(groups).encode(), where="c.toml")
    assert found == {key: tuple(names) for key, names in groups.items()}


def test_a_key_that_is_not_listed_is_an_error(tmp_path):
    (tmp_path / "c.toml").write_text(shard_list_text({"a": ["x"], "b": ["y"]}))
    assert read_shard_list(tmp_path / "c.toml", key="b") == [str(tmp_path / "y")]
    with pytest.raises(ArgumentError, match=r"\('a', 'b'\), found 'c'"):
        read_shard_list(tmp_path / "c.toml", key="c")


@pytest.mark.parametrize("raw", [b"", b"\xff", b"group = 1", b"group = ['']", b"a = 1", b"[a]\ngroup = ['x']\n[b]"])
def test_another_file_is_refused(raw):
    with pytest.raises(FormatError, match=r"^c\.toml: a list of shards must"):
        parse_shard_list(raw, where="c.toml")


def test_lists_of_trackbed_are_recognised(tmp_path):
    (tmp_path / "c.toml").write_text(shard_list_text({"a": ["x"]}))
    (tmp_path / "d.toml").write_text("group = ['x']")
    (tmp_path / "e.toml").mkdir()
    names = ("c.toml", "d.toml", "e.toml", "f.toml")
    assert [is_shard_list(tmp_path / name) for name in names] == [True, False, False, False]
