"""Resuming runs that were killed or failed."""

import contextlib
import gzip
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.support.tiers import slow_but
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import FormatError
from trackbed.preprocess import PreprocessConfig, preprocess

PROGRAM = """
import os, sys, time
from pathlib import Path
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import PreprocessConfig, preprocess

class Recording(ByteTokenizer):
    '''Records the texts it receives.'''

    def tokenize_batch(self, texts):
        time.sleep(0.002 * len(texts))
        with open("had", "a") as file:
            file.write("".join(text.split()[0] + "\\n" for text in texts))
        return super().tokenize_batch(texts)

if __name__ == "__main__":
    config = PreprocessConfig(
        inputs=tuple(map(Path, sys.argv[3:])), output="out/made", append_eod=True, workers=int(sys.argv[1]),
        json_keys=tuple(sys.argv[2].split(",")), chunk_bytes=1000, save_interval_bytes=3000,
    )
    preprocess(config, Recording())
"""
FOLDER = "made.unfinished"


@pytest.fixture
def corpus(tmp_path):
    lines = [json.dumps({"text": f"{n} {'word ' * (n % 40)}", "title": f"t{n} x"}) + "\n" for n in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(lines[:150]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[150:300]).encode()))
    (tmp_path / "c.jsonl").write_text("".join(lines[300:]))
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "out").mkdir()
    return tmp_path


def start(folder, *, workers=1, keys="text"):
    command = [sys.executable, "program.py", str(workers), keys, "a.jsonl", "b.jsonl.gz", "c.jsonl"]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said


def had(folder):
    path = folder / "had"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def made(folder):
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def whole(folder, **options):
    """Returns the files of an uninterrupted run, and empties the folder."""
    finish(start(folder, **options))
    files = made(folder)
    for name in files:
        (folder / "out" / name).unlink()
    return files, had(folder)


def record(folder):
    path = folder / "out" / FOLDER / "record.json"
    return json.loads(path.read_text()) if path.exists() else {"chunks": 0, "counts": {"records": 0}}


def kill(process):
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


def kill_when(process, folder, records):
    """Kills the process and its workers as soon as `records` records are saved."""
    while record(folder)["counts"]["records"] < records:
        assert process.poll() is None
        time.sleep(0.001)
    kill(process)


@pytest.mark.parametrize(
    ("keys", "workers"), slow_but([("text", 1), ("title,text", 2)], itertools.product(["text", "title,text"], [1, 2]))
)
def test_after_a_kill_the_same_command_makes_the_same_files_and_tokenises_nothing_twice(corpus, workers, keys):
    wanted, all_texts = whole(corpus, workers=workers, keys=keys)
    kill_when(start(corpus, workers=workers, keys=keys), corpus, 120)
    kept = record(corpus)["counts"]["records"]
    first = had(corpus)
    finish(start(corpus, workers=workers, keys=keys))
    assert made(corpus) == wanted
    second = had(corpus)
    done = {f"{prefix}{number}" for number in range(kept) for prefix in ("", "t")}
    assert done & set(all_texts) <= set(first)
    assert not done & set(second)
    assert set(all_texts) - done == set(second)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 2 else []) for seed in range(30)]
)
def test_however_often_and_whenever_a_run_is_killed_the_files_are_the_same(corpus, seed):
    draw = random.Random(seed)
    options = {"workers": draw.choice([1, 2, 3]), "keys": draw.choice(["text", "text,title"])}
    wanted, _ = whole(corpus, **options)
    for _ in range(5):
        kept = record(corpus)["counts"]["records"]
        process = start(corpus, **options)
        time.sleep(draw.uniform(0, 1.5))
        ended = process.poll() is not None
        kill(process)
        done = {f"{prefix}{number}" for number in range(kept) for prefix in ("", "t")}
        assert not done & set(had(corpus))
        if ended:
            break
    finish(start(corpus, **options))
    assert made(corpus) == wanted


def test_a_run_shorter_than_the_save_interval_saves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    config = PreprocessConfig(
        inputs=(tmp_path / "a.txt",), output=str(tmp_path / "out"), workers=1, save_interval_bytes=1001
    )
    seen = []
    preprocess(config, ByteTokenizer(), progress=lambda *_: seen.extend(path.name for path in tmp_path.iterdir()))
    assert "out.unfinished" not in seen


def test_the_caller_learns_what_is_kept_and_the_report_tells_it_from_this_runs_work(corpus):
    saves = []
    with pytest.raises(KeyboardInterrupt):
        run_in_process(corpus, on_save=lambda kept, total: saves.append((kept, total)), progress=stop_half_way)
    total = (corpus / "a.jsonl").stat().st_size
    assert saves[0] == (0, total)
    assert [kept for kept, _ in saves[1:]] == list(range(2000, saves[-1][0] + 1, 2000))
    again = []
    report = run_in_process(corpus, on_save=lambda *kept: again.append(kept))
    assert again[0] == saves[-1]
    assert (report.kept_bytes, report.input_bytes) == saves[-1]
    assert run_in_process(corpus).kept_bytes == 0


def stop_half_way(done, total):
    if done > total // 2:
        raise KeyboardInterrupt


def run_in_process(folder, *, progress=None, tokenizer=None, on_save=None, **options):
    config = PreprocessConfig(
        output=str(folder / "out" / "made"),
        **{"inputs": (folder / "a.jsonl",), "workers": 1, "chunk_bytes": 1000, "save_interval_bytes": 2000, **options},
    )
    return preprocess(config, tokenizer or ByteTokenizer(), progress=progress, on_save=on_save)


def fail_in_the_middle(folder, **options):
    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(folder, progress=interrupt, **options)
    assert (folder / "out" / FOLDER).is_dir()


def progress_of(folder, **options):
    seen = []
    report = run_in_process(folder, progress=lambda done, _: seen.append(done), **options)
    return seen, report


def test_a_run_that_is_interrupted_goes_on_and_reports_all_of_it(corpus):
    wanted = run_in_process(corpus)
    files = made(corpus)
    fail_in_the_middle(corpus)
    seen, report = progress_of(corpus)
    assert seen[0] > 0
    assert seen[-1] == (corpus / "a.jsonl").stat().st_size
    assert replace(report, kept_bytes=0) == wanted
    assert made(corpus) == files


@pytest.mark.parametrize("change", ["input", "eod", "keys", "chunks", "tokenizer"])
def test_the_saved_work_of_another_run_is_not_used(corpus, change, caplog):
    class Other(ByteTokenizer):
        fingerprint = "other"

    fail_in_the_middle(corpus)
    options = {
        "input": {},
        "eod": {"append_eod": True},
        "keys": {"json_keys": ("title",)},
        "chunks": {"chunk_bytes": 999},
        "tokenizer": {"tokenizer": Other()},
    }[change]
    if change == "input":
        os.utime(corpus / "a.jsonl", (1, 1))
    seen, _ = progress_of(corpus, **options)
    assert seen[0] == 0
    (message,) = caplog.messages
    assert message.endswith("must be of the same inputs, options, tokenizer, splitter and version, found others")
    assert FOLDER not in made_names(corpus)


def test_saved_work_for_more_keys_is_deleted(corpus):
    fail_in_the_middle(corpus, json_keys=("text", "title"))
    assert (corpus / "out" / FOLDER / "1.bin").exists()
    run_in_process(corpus)
    assert FOLDER not in made_names(corpus)


def made_names(folder):
    return sorted(path.name for path in (folder / "out").iterdir())


@pytest.mark.parametrize("name", ["0.bin", "0.lengths", "record.json"])
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_saved_work_that_is_damaged_is_not_used(corpus, name, damage, caplog):
    run_in_process(corpus)
    files = made(corpus)
    fail_in_the_middle(corpus)
    path = corpus / "out" / FOLDER / name
    raw = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(raw[:50] if damage == "cut" else b"\xff" * 8 + raw[8:])
    seen, _ = progress_of(corpus)
    assert seen[0] == 0
    assert "cannot be used, starting over" in caplog.text
    assert made(corpus) == files


def test_after_a_bad_record_the_work_goes_on_with_bad_ones_skipped(corpus):
    with (corpus / "a.jsonl").open("a") as file:
        file.write("bad\n" + '{"text": "last"}\n')
    with pytest.raises(FormatError, match=r"a\.jsonl:151: "):
        run_in_process(corpus)
    seen, report = progress_of(corpus, skip_bad=True)
    assert seen[0] > 0
    assert (report.records, report.bad) == (152, 1)
    assert report.first_bad[0].startswith(f"{corpus}/a.jsonl:151: ")


def test_with_a_tokenizer_without_a_fingerprint_nothing_is_saved(corpus):
    class WithoutFingerprint(ByteTokenizer):
        fingerprint = None

    def look(done, total):
        assert not (corpus / "out" / FOLDER).exists()

    run_in_process(corpus, progress=look, tokenizer=WithoutFingerprint())


def test_of_two_concurrent_runs_one_saves_its_work_and_both_succeed(corpus, caplog):
    wanted, _ = whole(corpus)
    with caplog.at_level(logging.WARNING):
        first = start(corpus)
        while record(corpus)["chunks"] == 0:
            time.sleep(0.001)
        said = finish(start(corpus))
        assert "locked by another process, so this run saves nothing" in said
        finish(first)
    assert made(corpus) == wanted


# At the last of twelve steps the second pair appears; no run comes to a thirteenth.
@pytest.mark.parametrize("step", slow_but([12, 13], range(1, 15)))
def test_a_run_killed_while_its_pairs_appear_tokenises_nothing_again(corpus, step):
    wanted, _ = whole(corpus, keys="text,title")
    dies = PROGRAM.replace(
        "    preprocess(config, Recording())",
        f"""
    import signal
    steps = 0
    def step(event, arguments):
        global steps
        if event == "os.rename" and str(arguments[1]).startswith("out/made_"):
            steps += 1
            if steps == {step}:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(step)
    preprocess(config, Recording())
""",
    )
    (corpus / "program.py").write_text(dies)
    process = start(corpus, keys="text,title")
    process.communicate()
    assert process.returncode == (-signal.SIGKILL if step <= 12 else 0)
    had(corpus)
    (corpus / "program.py").write_text(PROGRAM)
    finish(start(corpus, keys="text,title"))
    assert bool(had(corpus)) is (step > 12)
    assert made(corpus) == wanted


def test_a_run_goes_on_where_its_output_lies_inside_its_input(corpus):
    folder = corpus / "out"
    (corpus / "a.jsonl").rename(folder / "a.jsonl")
    options = {"inputs": (folder,)}

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(corpus, progress=interrupt, **options)
    assert (folder / FOLDER / "record.json").exists()
    seen, report = progress_of(corpus, **options)
    assert seen[0] > 0
    assert (report.files, report.records, report.bad) == (1, 150, 0)
    assert FOLDER not in made_names(corpus)
    again = run_in_process(corpus, input_format="jsonl", **options)
    assert (again.files, again.records) == (1, 150)
