"""Fixtures that run the command line in this process, and its inputs."""

import json

import pytest
from click.testing import CliRunner

from trackbed.cli.main import trackbed


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command line in an empty folder. The result has `exit_code`, `stdout` and `stderr`."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments):
        result = CliRunner().invoke(trackbed, [str(one) for one in arguments], prog_name="trackbed")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def corpus(tmp_path):
    """Three records, the second of them empty."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": "t"}) + "\n" for text in ("abc", "", "de")))
    return path


@pytest.fixture
def pair(run, corpus):
    """Prefix of the pair of the corpus, tokenised as bytes: two documents, `abc` and `de`."""
    run("preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", "made", "--workers", 1)
    return "made_text_document"
