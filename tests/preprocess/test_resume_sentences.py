"""Resuming runs that split sentences."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.support.files import punkt_model
from tests.support.tiers import slow_but
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import PreprocessConfig, open_splitter, preprocess

PROGRAM = """
import sys, time
from pathlib import Path
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import PreprocessConfig, open_splitter, preprocess

class Slow(ByteTokenizer):
    def tokenize_batch(self, texts):
        time.sleep(0.002 * len(texts))
        return super().tokenize_batch(texts)

if __name__ == "__main__":
    config = PreprocessConfig(
        inputs=(Path("a.jsonl"),), output="out/made", append_eod=True, workers=int(sys.argv[1]),
        json_keys=("text", "title"), chunk_bytes=2000, save_interval_bytes=6000,
    )
    seen = []
    preprocess(config, Slow(), splitter=open_splitter(sys.argv[2]), progress=lambda done, _: seen.append(done))
    print(seen[0])
"""


@pytest.fixture
def folder(tmp_path):
    texts = [punkt_model.made_up_text(seed, seed % 9) for seed in range(150)]
    lines = [json.dumps({"text": text, "title": f"{number}. He? No!"}) + "\n" for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "out").mkdir()
    return tmp_path


def start(folder, workers, splitter):
    command = [sys.executable, "program.py", str(workers), splitter]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, stdout=subprocess.PIPE, text=True)


def finish(process):
    """Waits for the program. Returns the bytes of input that it did not have to read."""
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return int(said)


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def saved_records(folder):
    path = folder / "out" / "made.unfinished" / "record.json"
    return json.loads(path.read_text())["counts"]["records"] if path.exists() else 0


@pytest.mark.parametrize(
    ("workers", "again", "splitter"),
    slow_but([(2, 1, "punkt")], [(1, 2, "sentencex"), (2, 1, "punkt"), (3, 2, "sentencex:fr")]),
)
def test_after_a_kill_the_same_command_makes_the_same_files(folder, workers, again, splitter):
    if splitter == "punkt":
        splitter = f"punkt:{punkt_model.write(punkt_model.train(), folder / 'model')}"
    assert finish(start(folder, workers, splitter)) == 0
    wanted = files(folder)
    for name in wanted:
        (folder / "out" / name).unlink()
    process = start(folder, workers, splitter)
    while saved_records(folder) < 40:
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert 0 < finish(start(folder, again, splitter)) < (folder / "a.jsonl").stat().st_size
    assert files(folder) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_however_often_and_whenever_a_run_is_killed_the_files_are_the_same(folder, seed):
    draw = random.Random(seed)
    finish(start(folder, 1, "sentencex"))
    wanted = files(folder)
    for name in wanted:
        (folder / "out" / name).unlink()
    for _ in range(5):
        process = start(folder, draw.choice([1, 2]), "sentencex")
        time.sleep(draw.uniform(0.2, 2))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(start(folder, 2, "sentencex"))
    assert files(folder) == wanted


def run(folder, splitter, progress=None):
    config = PreprocessConfig(
        inputs=(folder / "a.jsonl",),
        output=str(folder / "out" / "made"),
        workers=1,
        chunk_bytes=2000,
        save_interval_bytes=4000,
    )
    preprocess(config, ByteTokenizer(), splitter=splitter, progress=progress)


def interrupt_in_the_middle(folder, splitter):
    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, splitter, interrupt)


class Other:
    """A splitter that claims to be another version."""

    fingerprint = "other"

    def split(self, text):
        return [text]


class Unknown:
    """A splitter without a fingerprint."""

    def split(self, text):
        return [text]


@pytest.mark.parametrize("first", [None, "sentencex", "other"])
@pytest.mark.parametrize("second", [None, "sentencex", "sentencex:fr", "other"])
def test_the_saved_work_of_another_splitter_is_refused_and_removed(folder, first, second, caplog):
    first, second = (Other() if name == "other" else name and open_splitter(name) for name in (first, second))
    interrupt_in_the_middle(folder, first)
    assert (folder / "out" / "made.unfinished" / "0.bin").exists()
    seen = []
    run(folder, second, lambda done, _: seen.append(done))
    if getattr(first, "fingerprint", None) == getattr(second, "fingerprint", None):
        assert seen[0] > 0
        assert not caplog.messages
    else:
        assert seen[0] == 0
        (message,) = caplog.messages
        assert message.endswith("must be of the same inputs, options, tokenizer, splitter and version, found others")
    assert not (folder / "out" / "made.unfinished").exists()


def test_with_another_model_of_punkt_the_run_starts_over(folder):
    parameters = punkt_model.train()
    model = punkt_model.write(parameters, folder / "model")
    interrupt_in_the_middle(folder, open_splitter(f"punkt:{model}"))
    (model / "abbrev_types.txt").write_text("dr")
    seen = []
    run(folder, open_splitter(f"punkt:{model}"), lambda done, _: seen.append(done))
    assert seen[0] == 0


def test_with_a_splitter_without_a_fingerprint_nothing_is_saved(folder):
    interrupt_in_the_middle(folder, Unknown())
    assert not (folder / "out" / "made.unfinished").exists()


@pytest.mark.parametrize("name", ["0.lengths", "0.counts"])
def test_damaged_arrays_are_not_used(folder, name, caplog):
    run(folder, open_splitter())
    wanted = files(folder)
    interrupt_in_the_middle(folder, open_splitter())
    path = folder / "out" / "made.unfinished" / name
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    run(folder, open_splitter())
    assert "cannot be used, starting over" in caplog.text
    assert files(folder) == wanted
