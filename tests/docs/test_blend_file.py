"""The page on blend files, against the code that reads them."""

import re
from pathlib import Path

import pytest

from tests.support.files.blends import write_pair
from trackbed.blends import measure_blend, read_blend_file
from trackbed.blends.read import OPTIONS
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import NullTokenizer
from trackbed.errors import BlendFileError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats" / "blend-file.md").read_text()
PREFIXES = ("web-0", "web-1", "python", "c-0", "wiki")


def example(page):
    (found,) = re.findall(r"^```toml\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in PREFIXES:
        write_pair(tmp_path / "data" / name, [5000] * 500)
    return tmp_path


def test_the_example_is_read_and_built(data):
    text = example(ROOT / "docs" / "formats" / "blend-file.md")
    (data / "blend.toml").write_text(text.replace("train_iters = 100_000", "train_iters = 5"))
    file = read_blend_file("blend.toml")
    assert file.sizes.valid == 20 * 512
    blend = measure_blend(file)
    config = blend.config(tokenizer=NullTokenizer(100))
    train = BlendedMegatronDatasetBuilder(blend.dataset_class, blend.sizes, lambda: True, config).build()[0]
    assert len(train) >= 5 * 512


def test_the_page_lists_the_options_that_there_are():
    section = PAGE.split("## `[options]`")[1].split("\n## ")[0]
    others = {"GPTDatasetConfig", "attention_mask", "cu_seqlens", "max_seqlen"}
    assert set(re.findall(r"`(\w+)`", section)) - others == set(OPTIONS)


@pytest.mark.parametrize(
    ("section", "table"),
    [("Top-level keys", ""), ("`[size]`", "size"), ("`[[dataset]]`", "dataset"), ("`[[stage]]`", "stage")],
)
def test_the_page_lists_the_keys_that_there_are(tmp_path, section, table):
    """The error for an unknown key lists the known ones."""
    head = {"": "", "size": "[size]\n", "dataset": "[[dataset]]\n", "stage": "[[stage]]\n"}[table]
    top = "" if table == "" else "version = 1\n"
    path = tmp_path / "blend.toml"
    path.write_text(f"{top}{head}'?' = 1\n" + ("version = 1\n" if table == "" else ""))
    with pytest.raises(BlendFileError) as caught:
        read_blend_file(path)
    (known,) = re.findall(r"unknown key '.*\?'; known keys: (.*)", str(caught.value))
    rows = PAGE.split(f"## {section}\n")[1].split("\n## ")[0].split("\n### ")[0]
    listed = {
        key for row in re.findall(r"^\| (`.*?) \|", rows, flags=re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }
    tables = {"dataset", "options", "size", "stage"} if table == "" else set()
    assert listed | tables == set(known.split(", "))
