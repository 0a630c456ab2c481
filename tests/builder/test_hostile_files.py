"""Damaged files of data and caches: right samples, or an error in one sentence that names a file."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from tests.support.hostile.files import run_mutants
from tests.support.hostile.mutations import replace_by
from trackbed.cache import await_flush, find_problems, take_inventory
from trackbed.errors import CacheError, FormatError, TrackbedError
from trackbed.tokens import IndexedDataset

SIZES = (60, 6, 6)


def check(kind, folder, seeds, record):
    rows = run_mutants(kind, folder, seeds)
    assert len(rows) == len(seeds)
    wrong = [row for row in rows if row["wrong"]]
    shown = "\n".join(f"seed {row['seed']}: {row['done']}\n{row['wrong']}" for row in wrong[:5])
    assert not wrong, f"{len(wrong)} of {len(rows)}:\n{shown}"
    counts = sum((Counter(row["outcome"]) for row in rows), Counter())
    record(f"hostile {kind}", {"mutants": len(rows), **counts})
    print(f"{len(rows)} mutants of {kind}: {dict(counts)}")
    return counts


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(6), id="some"), pytest.param(range(6, 1515), id="many", marks=pytest.mark.slow)]
)
def test_a_damaged_pair_gives_right_samples_or_one_sentence(tmp_path, record_property, seeds):
    counts = check("pairs", tmp_path, seeds, record_property)
    assert min(counts["pairs opened"], counts["pairs refused"], counts["right"], counts["refused"]) > len(seeds) / 5


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(6), id="some"), pytest.param(range(6, 1015), id="many", marks=pytest.mark.slow)]
)
def test_a_damaged_cache_gives_right_samples_or_one_sentence(tmp_path, record_property, seeds):
    counts = check("caches", tmp_path, seeds, record_property)
    assert counts["verify finds problems"] > len(seeds) / 5
    assert counts["right"] > 100 * len(seeds)


def config_of(folder, order="megatron", **options):
    prefixes = [str(folder / f"pair{number}") for number in range(3)]
    return gpt_config(folder / "cache", blend=(prefixes, [3, 2, 1]), split="8,1,1", order=order, **options)


def content(datasets):
    return [tokens_of(dataset, range(len(dataset))) for dataset in datasets]


@contextmanager
def at_most(seconds):
    """Inside the block, a call that hangs is a TimeoutError."""

    def end(_number, _frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "loop"])
@pytest.mark.parametrize(
    "pattern",
    [
        ".trackbed/*GPTDataset-train.json",
        ".trackbed/notes/*.txt",
        ".trackbed/uses/*.txt",
        "*GPTDataset-train-description.txt",
        "*GPTDataset-train-shuffle_index.npy",
        ".trackbed/notes",
        ".trackbed/uses",
        ".trackbed/partial",
    ],
)
def test_what_is_no_regular_file_in_a_cache_neither_hangs_nor_ends_a_start_without_words(tmp_path, pattern, what):
    write_pairs(tmp_path)
    wanted = content(build(config_of(tmp_path), SIZES))
    await_flush()
    (tmp_path / "cache" / ".trackbed" / "notes").mkdir(exist_ok=True)
    (tmp_path / "cache" / ".trackbed" / "notes" / f"{'0' * 32}.txt").write_text("flushed nothing\n")
    for path in list((tmp_path / "cache").glob(pattern)):
        replace_by(path, what)
    with at_most(20):
        for problem in find_problems(take_inventory(str(tmp_path / "cache"))):
            assert str(tmp_path) in problem
        try:
            found = content(build(config_of(tmp_path), SIZES))
        except CacheError as error:
            found = str(error)
    assert found == wanted or (isinstance(found, str) and str(tmp_path / "cache") in found)


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "loop", "sparse"])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_pair_that_is_no_regular_file_is_an_error_of_trackbed(tmp_path, suffix, what):
    prefix = write_pair(tmp_path / "pair", [3, 4])
    replace_by(Path(f"{prefix}{suffix}"), what)
    if (suffix, what) == (".bin", "sparse"):
        assert len(IndexedDataset(prefix, mmap=False)) == 2
        return
    with at_most(20), pytest.raises((TrackbedError, ValueError), match=f"{prefix}"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("kind", ["swapped", "off"])
def test_the_order_instant_refuses_sequences_that_do_not_lie_one_after_the_other(tmp_path, kind):
    """Where a document ends was taken from any pointer there: wrong borders, and other ones by index and by gather."""
    lengths = [5] * 40
    prefix = write_pair(tmp_path / "pair", lengths)
    config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", order="instant", create_cu_seqlens=True)
    wanted = [sample["cu_seqlens"].tolist() for sample in build(config, (12, None, None))[0]]
    at = 34 + 4 * 40 + 8 * 20
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    if kind == "swapped":
        raw[at : at + 8], raw[at + 8 : at + 16] = raw[at + 8 : at + 16], raw[at : at + 8]
    else:
        raw[at : at + 8] = struct.pack("<q", 20 * 10 + 4)
    Path(f"{prefix}.idx").write_bytes(raw)
    train = build(config, (12, None, None))[0]
    refused = 0
    for position, borders in enumerate(wanted):
        for get in (lambda position: train[position], lambda position: train.gather([position])["cu_seqlens"]):
            try:
                found = get(position)
            except FormatError as error:
                refused += f"{prefix}.idx: sequences must lie one after the other" in str(error)
                continue
            found = found["cu_seqlens"].tolist() if isinstance(found, dict) else found[0].tolist()
            assert found == borders
    assert refused in (2, 4)


def test_the_order_instant_refuses_a_split_whose_ends_are_damaged(tmp_path):
    prefix = write_pair(tmp_path / "pair", [5] * 40)
    at = 34 + 4 * 40
    for sequence, value in ((0, 2), (20, 4), (39, 398), (20, -8)):
        raw = bytearray(Path(f"{prefix}.idx").read_bytes())
        raw[at + 8 * sequence : at + 8 * sequence + 8] = struct.pack("<q", value)
        Path(f"{prefix}x.idx").write_bytes(raw)
        shutil.copy(f"{prefix}.bin", f"{prefix}x.bin")
        config = gpt_config(tmp_path / "cache", blend=([f"{prefix}x"], None), split="1,1", order="instant")
        with pytest.raises(FormatError, match=r"pairx\.idx"):
            content(build(config, (2, 2, None))[:2])


def test_tokens_that_are_no_integers_are_refused_at_the_start(tmp_path):
    prefix = write_pair(tmp_path / "pair", [9] * 9, dtype=np.float64)
    for order in ("megatron", "balanced", "instant"):
        config = gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", order=order)
        with pytest.raises(FormatError, match="tokens must be integers, found float64"):
            build(config, (2, None, None))


def remove_an_index(cache):
    """Makes an entry of a cache damaged, so that a start wants to build it."""
    path = next(cache.glob("*GPTDataset-train-shuffle_index.npy"))
    path.unlink()
    return path


@pytest.fixture
def read_only(tmp_path):
    """Mounts a folder where not even root may write to it; skips where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    view = tmp_path / "view"
    view.mkdir()

    def make(folder):
        for command in (["mount", "--bind", folder, view], ["mount", "-o", "remount,bind,ro", view]):
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine does not let tests mount: {done.stderr.decode().strip()}")
        return view

    yield make
    subprocess.run(["umount", "--lazy", view], capture_output=True, check=False)


@pytest.mark.parametrize("order", ["megatron", "balanced"])
def test_an_index_that_is_missing_on_a_read_only_mount_is_an_error_that_says_what_to_do(tmp_path, read_only, order):
    (tmp_path / "data").mkdir()
    write_pairs(tmp_path / "data")
    build(config_of(tmp_path / "data", order), SIZES)
    view = read_only(tmp_path / "data" / "cache")
    config = config_of(tmp_path / "data", order)
    config.path_to_cache = str(view)
    assert content(build(config, SIZES))
    remove_an_index(tmp_path / "data" / "cache")
    words = "Read-only file system; path_to_cache must name a folder that can be written to, or one where every index"
    with pytest.raises(CacheError, match=words) as raised:
        build(config, SIZES)
    assert str(view) in str(raised.value)


AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.builder.test_hostile_files import SIZES, config_of
from tests.support.files.blends import build
if os.geteuid() == 0:  # whom no mode of a folder stops
    os.setgid(65534)
    os.setuid(65534)
from trackbed.errors import CacheError
try:
    build(config_of(Path(sys.argv[1])), SIZES)
except CacheError as error:
    print(error)
"""


def test_an_index_that_is_missing_where_a_user_may_not_write_is_an_error_that_says_what_to_do():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_pairs(folder)
        build(config_of(folder), SIZES)
        path = remove_an_index(folder / "cache")
        folders = [one for one in (folder / "cache", *(folder / "cache").rglob("*")) if one.is_dir()]
        for one in folders:
            one.chmod(0o555)
        arguments = [sys.executable, "-c", AS_NOBODY, name, str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
        for one in folders:
            one.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "Permission denied; path_to_cache must name a folder that you may read from and write to" in done.stdout
    assert str(path.parent) in done.stdout
    assert len(done.stdout.splitlines()) == 1
