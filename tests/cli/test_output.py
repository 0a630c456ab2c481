"""Output in encodings other than UTF-8."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from trackbed.preprocess import PreprocessConfig, open_tokenizer, preprocess

TEXT = "caf\u00e9 \u6771\u4eac \U0001f642"
BLEND = """
version = 1
sequence_length = 8
split = "1"
tokenizer = "bytes"
cache = "cache"

[[dataset]]
path = "a_text_document"
"""
ENCODINGS = {
    "POSIX": ("ascii", {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    "ascii": ("ascii", {"PYTHONIOENCODING": "ascii"}),
    "latin-1": ("latin-1", {"PYTHONIOENCODING": "latin-1"}),
    "cp1252": ("cp1252", {"PYTHONIOENCODING": "cp1252"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("output")
    (path / "a.jsonl").write_text("".join(json.dumps({"text": TEXT * count}) + "\n" for count in (1, 1, 3)))
    config = PreprocessConfig(inputs=(path / "a.jsonl",), output=str(path / "a"), workers=1, append_eod=True)
    preprocess(config, open_tokenizer("bytes"))
    (path / "blend.toml").write_text(BLEND)
    return path


def run(folder, *words, environment):
    program = "from trackbed.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.mark.parametrize(("encoding", "environment"), ENCODINGS.values(), ids=ENCODINGS)
def test_inspect_draws_bars_and_escapes_texts(folder, encoding, environment):
    words = ("inspect", "a_text_document", "--tokenizer", "bytes")
    shown = run(folder, *words, environment=environment).decode(encoding)
    assert " 2 | " + "#" * 40 in " ".join(shown.split())
    assert TEXT.encode(encoding, errors="backslashreplace").decode(encoding) in shown


@pytest.mark.parametrize(("encoding", "environment"), [ENCODINGS["POSIX"], ENCODINGS["latin-1"]])
def test_show_escapes_texts(folder, encoding, environment):
    shown = run(folder, "show", "blend.toml", "--sample", "0", environment=environment).decode(encoding)
    assert "a_text_document" in shown
    assert any(char in shown for char in ("\\u4eac", "\\xe9", "\u00e9", "\\u6771", "\\U0001f642", "\\ufffd"))


@pytest.mark.parametrize("environment", [ENCODINGS["POSIX"][1], ENCODINGS["latin-1"][1]], ids=["POSIX", "latin-1"])
def test_json_stays_json(folder, environment):
    raw = run(folder, "inspect", "a_text_document", "--tokenizer", "bytes", "--json", environment=environment)
    assert json.loads(raw.decode("ascii"))["first_documents"][0]["text"] == TEXT + "<eod>"


def test_in_utf8_nothing_is_escaped(folder):
    words = ("inspect", "a_text_document", "--tokenizer", "bytes")
    shown = run(folder, *words, environment={"PYTHONIOENCODING": "utf-8"}).decode()
    assert TEXT in shown
    assert "\u2588" in shown


def test_the_name_of_a_pair_may_be_of_any_script_or_bytes(tmp_path):
    from tests.support.files.built_pair import build

    environment = ENCODINGS["POSIX"][1]
    for name in ("\u6771", os.fsdecode(b"\xff")):
        build(tmp_path / name, [[1, 2]], np.uint16)
        assert b"documents 1" in run(tmp_path, "inspect", name, environment=environment)
