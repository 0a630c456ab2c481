import tomllib
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.blends.toml_tables import find_key_lines

TEXT = """\
# a = 1
title = "x # y"   # a comment
long = \"\"\"
[no.table]
no = "key" \\
\"\"\"\"
literal = '''
'no' = 1''''
"quoted key".'with = sign' = 1979-05-27 07:32:00
numbers = [ # a comment ]
  1, [2, 3],

  { a = 4, "b]" = "}" }, ]
[table.below]
x = { y.z = "a\\"b", w = [] }
[[list]]
[[list.inner]]
k = 1
[[list.inner]]
k = 2
[list.inner.deep]
k = 3
[[list]]
k = ''
"""


def paths(value, path=()):
    """Yields all key paths of a value that `tomllib` returned."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


def test_every_key_is_found_on_its_line():
    found = find_key_lines(TEXT)
    assert set(found) == set(paths(tomllib.loads(TEXT)))
    lines = TEXT.splitlines()
    assert lines[found["quoted key", "with = sign"] - 1].startswith('"quoted key"')
    assert [lines[found["list", 0, "inner", number, "k"] - 1] for number in (0, 1)] == ["k = 1", "k = 2"]
    assert lines[found["list", 0, "inner", 1, "deep", "k"] - 1] == "k = 3"
    assert lines[found["list", 1, "k"] - 1] == "k = ''"
    assert lines[found["numbers", 2, "b]"] - 1] == '  { a = 4, "b]" = "}" }, ]'
    assert lines[found["table", "below", "x", "y", "z"] - 1].startswith("x = ")


def test_lines_that_end_as_on_windows_count_once():
    assert find_key_lines("a = 1\r\n\r\nb = 2\r\n") == {("a",): 1, ("b",): 3}


@pytest.mark.parametrize("text", ["", "\n", "# only a comment", "a=1", "  a  .  b=1#", "[ a . 'b' ]", "a=[[],[[]]]"])
def test_short_texts(text):
    assert set(find_key_lines(text)) == set(paths(tomllib.loads(text)))


WORDS = st.text(st.sampled_from(list("ab\"'#[]{}=.,\n\\ \t\u00e9")), max_size=6)
SCALARS = st.one_of(st.integers(-9, 9), st.booleans(), st.floats(0, 1), st.just(date(2024, 2, 29)), WORDS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)


def quoted(text):
    escaped = "".join(f"\\u{ord(char):04x}" if char in '"\\\n\t' else char for char in text)
    return f'"{escaped}"'


def string(text, style):
    """Writes a string in one of the four styles of TOML, if that style can represent it."""
    plain = not set(text) & set("'\n\\")
    if style == 1 and plain:
        return f"'{text}'"
    if style == 2 and "'''" not in text and not text.startswith("\n") and not text.endswith("'"):
        return f"'''\n{text}'''"
    if style == 3:
        return '"""\n' + text.replace("\\", "\\\\").replace('"""', '""\\"') + "\\\n  " + '"""'
    return quoted(text)


def written(value, draw):
    space = draw(st.sampled_from(["", " ", "\t"]))
    if isinstance(value, dict):
        inner = ", ".join(f"{quoted(key)}{space}={space}{written(child, draw)}" for key, child in value.items())
        return f"{{{space}{inner}{space}}}"
    if isinstance(value, list):
        blank = draw(st.sampled_from(["", "\n", " # ]\n"]))
        return f"[{blank}" + "".join(f"{written(child, draw)}{blank},{blank}" for child in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return string(value, draw(st.integers(0, 3))) if isinstance(value, str) else str(value)


@given(st.dictionaries(WORDS, VALUES, max_size=4), st.lists(st.dictionaries(WORDS, VALUES, max_size=3)), st.data())
def test_the_keys_are_those_that_tomllib_reads(top, tables, data):
    lines = []
    marks = {}
    for prefix, table in [((), top), *((("a list", number), table) for number, table in enumerate(tables))]:
        if prefix:
            lines.append('[["a list"]]')
        if not prefix:
            table.pop("a list", None)
        for key, value in table.items():
            marks[(*prefix, key)] = sum(line.count("\n") + 1 for line in lines) + 1
            lines.append(f"{quoted(key)} = {written(value, data.draw)} # x")
    text = "\n".join(lines)
    found = find_key_lines(text)
    assert set(found) == set(paths(tomllib.loads(text)))
    assert {path: found[path] for path in marks} == marks
