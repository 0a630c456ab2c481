import json
import re

import pytest

from tests.support.files.blends import write_pair, write_pairs
from trackbed.tokens import IndexedDataset

BLEND = """\
version = 1
sequence_length = 16
split = "8,1,1"
cache = "cache"
options.eod_mask_loss = true
tokenizer = { eod = 100, vocab_size = 101 }
size = { train = 300, valid = 5, test = 5 }
[[dataset]]
path = "pair0"
weight = 0.5
[[dataset]]
path = "pair1"
weight = 0.5
"""


@pytest.fixture
def blend(tmp_path):
    write_pairs(tmp_path)
    (tmp_path / "blend.toml").write_text(BLEND)
    return tmp_path


def test_a_sample_is_shown_document_by_document(run, blend):
    found = run("show", "blend.toml", "--sample", 5)
    assert found.exit_code == 0, found.stderr
    head, second, *rest = found.stdout.splitlines()
    assert head.startswith("sample 5 of ")
    assert " of train: dataset " in head
    assert "17 tokens of " in second
    assert sum(line.startswith("--- ") and ", document " in line for line in rest) >= 1
    assert "{-" in found.stdout


def test_a_sample_of_one_document_is_shown_in_the_singular(run, tmp_path):
    write_pair(tmp_path / "pair0", [60] * 20)
    (tmp_path / "blend.toml").write_text(BLEND.replace('[[dataset]]\npath = "pair1"\nweight = 0.5\n', ""))
    lines = {run("show", "blend.toml", "--sample", number).stdout.splitlines()[1].split(": ")[1] for number in range(9)}
    assert lines == {"17 tokens of 1 document", "17 tokens of 2 documents"}


def test_json_has_documents_offsets_and_text(run, blend):
    found = json.loads(run("show", "blend.toml", "--sample", 5, "--split", "valid", "--json").stdout)
    assert found["position"] == 5
    ids = []
    for origin in found["origins"]:
        text = " ".join(one["text"] for one in origin["text"]).split()
        real = IndexedDataset(origin["prefix"])[origin["document"]][origin["start"] : origin["stop"]]
        assert [int(word) for word in text] == real.tolist()
        ids += real.tolist()
    counts = [one["counts"] for origin in found["origins"] for one in origin["text"] for _ in one["text"].split()]
    assert counts == [True, *(token != 100 for token in ids[:-1])]


def test_a_position_from_the_end_is_shown_as_the_number_that_it_is(run, blend):
    (size,) = re.findall(r" of ([\d,]+) of train", run("show", "blend.toml", "--sample", 0).stdout)
    last = int(size.replace(",", "")) - 1
    from_the_end, from_the_start = (
        run("show", "blend.toml", "--sample", number, "--json").stdout for number in (-1, last)
    )
    assert json.loads(from_the_end)["position"] == last
    assert from_the_end == from_the_start
    (blend / "blend.toml").write_text(BLEND.replace('[[dataset]]\npath = "pair1"\nweight = 0.5\n', ""))
    assert json.loads(run("show", "blend.toml", "--sample", -1, "--json").stdout)["sample"] >= 0


BYTES = """\
version = 1
sequence_length = 2
split = "1"
cache = "cache"
tokenizer = "bytes"
size = { train = 2 }
[[dataset]]
path = "made_text_document"
weight = 1
"""


def test_the_tokenizer_of_the_file_decodes_it(run, tmp_path, pair):
    (tmp_path / "blend.toml").write_text(BYTES)
    shown = [run("show", "blend.toml", "--sample", k).stdout for k in range(2)]
    assert all(f"{pair}, document " in one for one in shown)
    text = "".join(line for one in shown for line in one.splitlines()[2:] if not line.startswith("--- "))
    assert set(text) == set("abcde")


@pytest.mark.parametrize("sample", [306, -400])
def test_a_position_out_of_range_is_a_one_line_error(run, blend, sample):
    found = run("show", "blend.toml", "--sample", sample)
    assert found.exit_code == 1
    assert "--sample must be in [-" in found.stderr
    assert found.stderr.count("\n") == 1


def test_without_a_position_it_is_the_first_sample(run, blend):
    first = run("show", "blend.toml")
    assert first.stdout.startswith("sample 0 of ")
    assert first.stdout == run("show", "blend.toml", "--sample", 0).stdout
