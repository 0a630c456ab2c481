import json
import os
import pty
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trackbed import __version__
from trackbed.cli.main import trackbed
from trackbed.kernels import available_levels

TRACKBED = [sys.executable, "-m", "trackbed"]
HEAVY = ("numpy", "orjson", "rich", "tokenizers", "torch", "matplotlib")


def shell(*arguments, folder):
    return subprocess.run([*TRACKBED, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def start_long_run(folder, **options):
    """Starts a run of several seconds, and returns when it has written its first bytes."""
    records = "".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(20_000))
    (folder / "corpus.jsonl").write_text(records)
    arguments = ["preprocess", *["corpus.jsonl"] * 20, "--tokenizer", "bytes", "--output", "made", "--workers", "2"]
    process = subprocess.Popen([*TRACKBED, *arguments], cwd=folder, start_new_session=True, **options)
    while not any(path.stat().st_size for path in folder.glob("*.partial")) and process.poll() is None:
        time.sleep(0.005)
    return process


def number_of_threads(pid):
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0


def test_help_lists_every_command_and_loads_nothing_heavy(tmp_path):
    program = f"""
import sys
from trackbed.cli.main import trackbed
try:
    trackbed(["--help"], prog_name="trackbed")
finally:
    print(*sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    for command in ("blend", "cache", "inspect", "merge", "preprocess", "seal", "train-tokenizer", "verify"):
        assert f"\n  {command} " in done.stdout


def test_help_lists_the_commands_under_headings(run):
    _, *sections = re.split(r"\n\n(?=\S)", run("--help").stdout.partition("--help")[2].partition("\n\n  From text")[0])
    listed = {}
    for section in sections:
        heading, *lines = section.splitlines()
        listed[heading.removesuffix(":")] = [line.split()[0] for line in lines]
    assert listed == {
        "Token files (pairs of .bin and .idx)": [
            "preprocess",
            "train-tokenizer",
            "merge",
            "inspect",
            "verify",
            "seal",
            "finish",
        ],
        "Blends and their indices": ["blend", "build", "show", "where", "export", "cache"],
        "Checkpoints": ["ckpt"],
        "Training runs": ["report"],
    }
    assert sorted(sum(listed.values(), [])) == sorted(trackbed.commands)
    columns = {re.match(r"  \S+ +", line).end() for section in sections for line in section.splitlines()[1:]}
    assert len(columns) == 1  # the texts begin below each other


@pytest.mark.parametrize("command", ["merge", "inspect", "verify", "seal", "finish"])
def test_the_list_says_which_commands_are_for_pairs_of_files(run, command):
    (line,) = (line for line in run("--help").stdout.splitlines() if line.startswith(f"  {command} "))
    assert ".bin and .idx" in line


@pytest.mark.parametrize(
    "command", ["blend", "cache", "inspect", "merge", "preprocess", "seal", "train-tokenizer", "verify"]
)
def test_the_help_of_every_command_fits_a_terminal_of_80_columns(run, command):
    found = run(command, "--help")
    assert found.exit_code == 0
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_the_console_script_and_the_module_are_the_same_program(tmp_path):
    found = shell("--version", folder=tmp_path)
    version, kernels = found.stdout.splitlines()
    assert (found.returncode, version) == (0, f"trackbed, version {__version__}")
    assert re.fullmatch(r"kernels: built by (GCC|Clang) \d+\.\d+\.\d+, for this processor: .+", kernels)
    assert kernels.endswith(f": {', '.join(available_levels())}")


def test_what_the_library_refuses_is_one_line_and_status_1(tmp_path):
    found = shell("preprocess", "gone.jsonl", "--tokenizer", "bytes", "--output", "made", folder=tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == "trackbed: gone.jsonl: an input must be a file or a folder, found nothing\n"


def test_ctrl_c_that_arrives_as_a_wait_takes_its_lock_again_is_an_interrupt(run, monkeypatch):
    def wait(**options):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(trackbed.commands["seal"], "callback", wait)
    found = run("seal", "a")
    assert (found.exit_code, found.stderr) == (130, "trackbed: interrupted\n")


def test_a_wrong_command_line_is_status_2(run):
    assert run("preprocess", "corpus.jsonl").exit_code == 2
    assert run("nonsense").exit_code == 2
    assert run("verify").exit_code == 2


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "trackbed: interrupted: nothing is kept yet\n"), (signal.SIGTERM, "")]
)
def test_an_interrupted_run_removes_its_files_and_prints_at_most_a_line(tmp_path, number, said):
    process = start_long_run(tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.killpg(process.pid, signal.SIGINT) if number == signal.SIGINT else process.terminate()
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (128 + number, "", said)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_training_is_interrupted_at_once_although_its_library_blocks_signals(tmp_path, number):
    words = random.Random(1)
    with (tmp_path / "corpus.txt").open("w") as file:
        for _ in range(600_000):
            file.write(f"{words.getrandbits(64):x} ")
    arguments = ["train-tokenizer", "corpus.txt", "--output", "t.json"]
    process = subprocess.Popen([*TRACKBED, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while number_of_threads(process.pid) < 3 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    begin = time.monotonic()
    said = process.communicate(timeout=60)[1]
    assert time.monotonic() - begin < 2
    assert process.returncode == 128 + number
    assert said == ("trackbed: interrupted\n" if number == signal.SIGINT else "")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_terminal_gets_a_bar_on_stderr(tmp_path):
    ours, theirs = pty.openpty()
    process = start_long_run(tmp_path, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while b"MB/s" not in shown:
            shown += os.read(ours, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"tokenising" in shown


@pytest.mark.parametrize("words", ["--version", "--help", "inspect --limits"])
def test_an_output_that_takes_nothing_is_one_line_and_a_closed_one_is_none(tmp_path, words):
    command = f"exec {shlex.quote(sys.executable)} -m trackbed {words}"
    full = subprocess.run(f"{command} > /dev/full", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (full.returncode, full.stderr) == (1, "trackbed: No space left on device\n")
    closed = subprocess.run(f"{command} >&-", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
