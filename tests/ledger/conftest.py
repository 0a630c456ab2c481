"""A small blend for runs."""

import pytest

from tests.support.files.built_pair import build

BLEND = """version = 1
sequence_length = 16
order = "instant"
split = "80,20"
size = {train = 400, valid = 20}
tokenizer = {eod = 0, vocab_size = 1000}

[[dataset]]
path = "a"
weight = 3

[[dataset]]
path = "b"
weight = 1
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with `blend.toml`."""
    folder = tmp_path_factory.mktemp("blend")
    for name, first in (("a", 1), ("b", 500)):
        build(folder / name, [[first + (7 * one + two) % 400 for two in range(90)] + [0] for one in range(60)])
    (folder / "blend.toml").write_text(BLEND)
    return folder
