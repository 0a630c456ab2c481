"""The command line, killed at random times.

A run is killed with its workers at a random time between the creation of its first partial file and its end. Files
under final names must then be complete, and the next run must remove all others and write the same files as an
uninterrupted run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from trackbed.tokens import verify_content

MOMENTS = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 2 else []) for seed in range(25)]


@dataclass(frozen=True)
class Command:
    """A command that writes the pair `out/made`, and the files of an uninterrupted run."""

    arguments: list[str]
    folder: Path
    files: dict[str, bytes]
    seconds: float
    """Time from its first partial file to its end."""

    @classmethod
    def tried(cls, arguments, folder):
        process = start(arguments, folder)
        wait_for_partial(process, folder)
        begin = time.monotonic()
        assert process.wait() == 0
        seconds = time.monotonic() - begin
        return cls(arguments, folder, files_in(folder / "out"), seconds)


def start(arguments, folder):
    (folder / "out").mkdir(exist_ok=True)
    for path in (folder / "out").iterdir():
        path.unlink()
    return subprocess.Popen(
        [sys.executable, "-m", "trackbed", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_partial(process, folder):
    while process.poll() is None and not list((folder / "out").glob("*.partial")):
        time.sleep(0.001)


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_and_run_again(command, seed):
    process = start(command.arguments, command.folder)
    wait_for_partial(process, command.folder)
    time.sleep(random.Random(seed).uniform(0, command.seconds))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    out = command.folder / "out"
    for idx in out.glob("*.idx"):
        verify_content(str(idx.with_suffix("")))
    again = [sys.executable, "-m", "trackbed", *command.arguments]
    subprocess.run(again, cwd=command.folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert files_in(out) == command.files


@pytest.fixture(scope="module")
def lines():
    words = random.Random(1).choices(["the", "cat", "sat", "on", "mat", "and", "then", "some"], k=600_000)
    texts = (" ".join(words[start : start + 60]) for start in range(0, len(words), 60))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture(scope="module")
def preprocess_command(tmp_path_factory, lines, tokenizer_file):
    folder = tmp_path_factory.mktemp("preprocess")
    (folder / "corpus.jsonl").write_text(lines)
    options = ["--tokenizer", str(tokenizer_file), "--output", "out/made", "--append-eod", "--workers", "2"]
    return Command.tried(["preprocess", "corpus.jsonl", *options], folder)


@pytest.fixture(scope="module")
def merge_command(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("merge")
    (folder / "corpus.jsonl").write_text(lines)
    (folder / "pairs").mkdir()
    for name in ("a", "b", "c"):
        made = ["preprocess", "corpus.jsonl", "--tokenizer", "bytes", "--output", f"pairs/{name}", "--workers", "1"]
        subprocess.run([sys.executable, "-m", "trackbed", *made], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return Command.tried(["merge", "pairs", "--output", "out/made"], folder)


@pytest.mark.parametrize("seed", MOMENTS)
def test_a_killed_preprocess_leaves_nothing_half_written_and_the_next_one_clears_up(preprocess_command, seed):
    kill_and_run_again(preprocess_command, seed)


@pytest.mark.parametrize("seed", MOMENTS)
def test_a_killed_merge_leaves_nothing_half_written_and_the_next_one_clears_up(merge_command, seed):
    kill_and_run_again(merge_command, seed)
