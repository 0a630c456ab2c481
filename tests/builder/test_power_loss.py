"""Indices after a loss of power: what was not on the disk is never served, and never in the way."""

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from tests.support.files.tidy import remove_folder
from tests.support.tiers import slow_but
from trackbed.cache import await_flush, take_inventory
from trackbed.cli.main import trackbed
from trackbed.tokens import IndexedDatasetBuilder

SIZES = (60, 6, 6)
ORDERS = ["megatron", "balanced"]
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


def content(datasets):
    return [tokens_of(dataset, range(len(dataset))) for dataset in datasets]


def config_of(folder, order="megatron", **options):
    return gpt_config(folder / "cache", blend=(write_once(folder), [3, 2, 1]), split="8,1,1", order=order, **options)


def write_once(folder):
    prefixes = [str(folder / f"pair{number}") for number in range(3)]
    return prefixes if Path(f"{prefixes[-1]}.idx").exists() else write_pairs(folder)


def build_unmarked(folder, monkeypatch, order="megatron"):
    """Indices that were written in the boot "before", and that no flush has reached."""
    monkeypatch.setenv("TRACKBED_BOOT_ID", "before")
    found = content(build(config_of(folder, order), SIZES))
    await_flush()
    remove_folder(folder / "cache" / ".trackbed" / "notes")
    return found


def zero(path, start=0):
    """Make the bytes of a file zeros, as a loss of power does that leaves its size and its time."""
    status, size = path.stat(), path.stat().st_size
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(size - start))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = path.stat()
    assert (found.st_ino, found.st_size, found.st_mtime_ns) == (status.st_ino, size, status.st_mtime_ns)


def files_of(cache):
    """Every file that belongs to an entry."""
    found = [path for path in cache.rglob("*") if path.is_file()]
    return [path for path in found if path.parent.name not in ("notes", "uses", "partial")]


def marks_in(cache):
    """What the files of notes say, which are empty until a flush has ended."""
    return b"".join(path.read_bytes().strip(b"\0") for path in sorted((cache / ".trackbed" / "notes").glob("*")))


@pytest.mark.parametrize(
    ("order", "start"), slow_but([("megatron", 0), ("balanced", 128)], itertools.product(ORDERS, [0, 128]))
)
def test_zeros_in_any_file_of_another_boot_are_never_served(tmp_path, monkeypatch, order, start):
    wanted = build_unmarked(tmp_path, monkeypatch, order)
    shutil.copytree(tmp_path / "cache", tmp_path / "kept", copy_function=os.link)
    names = sorted(str(path.relative_to(tmp_path / "cache")) for path in files_of(tmp_path / "cache"))
    assert len(names) >= 30
    for name in names:
        remove_folder(tmp_path / "cache")
        shutil.copytree(tmp_path / "kept", tmp_path / "cache", copy_function=shutil.copy2)
        if (tmp_path / "cache" / name).stat().st_size > start:
            zero(tmp_path / "cache" / name, start)
        monkeypatch.setenv("TRACKBED_BOOT_ID", "after")
        assert content(build(config_of(tmp_path, order), SIZES)) == wanted, name
        await_flush()
        whole = [entry.condition.value for entry in take_inventory(str(tmp_path / "cache")).entries]
        assert set(whole) == {"whole"}, name


@pytest.mark.parametrize("order", ORDERS)
def test_entries_of_another_boot_without_marks_are_compared(tmp_path, monkeypatch, order):
    wanted = build_unmarked(tmp_path, monkeypatch, order)
    for path in (tmp_path / "cache").rglob("*-*index.npy"):
        zero(path, 128)
    monkeypatch.setenv("TRACKBED_BOOT_ID", "after")
    assert content(build(config_of(tmp_path, order), SIZES)) == wanted


def test_marked_entries_are_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKBED_BOOT_ID", "before")
    wanted = content(build(config_of(tmp_path), SIZES))
    await_flush()
    monkeypatch.setenv("TRACKBED_BOOT_ID", "after")
    monkeypatch.setattr("trackbed.cache.lookup.compare_chunks", None)
    assert content(build(config_of(tmp_path), SIZES)) == wanted


def test_unmarked_entries_are_read_once_and_then_marked(tmp_path, monkeypatch):
    wanted = build_unmarked(tmp_path, monkeypatch)
    monkeypatch.setenv("TRACKBED_BOOT_ID", "after")
    assert content(build(config_of(tmp_path), SIZES)) == wanted
    await_flush()
    monkeypatch.setenv("TRACKBED_BOOT_ID", "later")
    monkeypatch.setattr("trackbed.cache.lookup.compare_chunks", None)
    assert content(build(config_of(tmp_path), SIZES)) == wanted


def test_entries_of_this_boot_are_not_read_again_and_marks_change_no_manifest(tmp_path, monkeypatch):
    build_unmarked(tmp_path, monkeypatch)
    before = {path: path.read_bytes() for path in (tmp_path / "cache" / ".trackbed").glob("*.json")}
    monkeypatch.setattr("trackbed.cache.lookup.compare_chunks", None)
    build(config_of(tmp_path), SIZES)
    assert {path: path.read_bytes() for path in (tmp_path / "cache" / ".trackbed").glob("*.json")} == before


def test_a_flush_that_fails_marks_nothing_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def fail(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    monkeypatch.setattr("trackbed.files.writeback.flush_file_system", fail)
    with caplog.at_level("DEBUG", logger="trackbed.files.writeback"):
        build(config_of(tmp_path), SIZES)
        await_flush()
    assert "not known to be on the disk" in caplog.text
    assert marks_in(tmp_path / "cache") == b""


def test_a_start_does_not_wait_for_the_flush_and_the_command_does(tmp_path, monkeypatch):
    """The flush begins when all is built, and takes a second here: a start is over long before."""
    events = []

    def flush(_folder):
        events.append("begins")
        time.sleep(1.0)
        events.append("ends")

    monkeypatch.setattr("trackbed.files.writeback.flush_file_system", flush)
    config = config_of(tmp_path)
    datasets = build(config, SIZES)
    assert "ends" not in events
    assert tokens_of(datasets[0], range(5))
    await_flush()
    assert events == ["begins", "ends"]

    (tmp_path / "blend.toml").write_text(
        'version = 1\nsequence_length = 16\nsplit = "1"\nsize = {train = 20}\ncache = "other"\n'
        'tokenizer = "bytes"\n[[dataset]]\npath = "pair0"\nweight = 1\n'
    )
    result = CliRunner().invoke(trackbed, ["build", str(tmp_path / "blend.toml")])
    assert result.exit_code == 0, result.output
    assert events == ["begins", "ends"] * 2
    assert marks_in(tmp_path / "other")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_flush_that_the_system_refuses_marks_nothing(tmp_path):
    """The same with the real call, which the kernel's tracer makes fail."""
    config_of(tmp_path)
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); from tests.support.files import blends;"
        "from trackbed.cache import await_flush; folder = Path(sys.argv[1]);"
        "config = blends.gpt_config(folder / 'cache', blend=([str(folder / 'pair0')], None), split='8,1,1');"
        "print(len(blends.build(config)[0])); await_flush()"
    )
    inject = ["strace", "-f", "-o", str(tmp_path / "trace"), "-e", "trace=syncfs", "-e", "inject=syncfs:error=EIO"]
    arguments = ["python", "-c", program, str(tmp_path), str(ROOT)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([*inject, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EIO" in (tmp_path / "trace").read_text()
    assert marks_in(tmp_path / "cache") == b""


@pytest.mark.parametrize("has_manifest", [False, True])
@pytest.mark.parametrize("what", ["description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"])
def test_zeros_instead_of_a_description_or_header_do_not_stay_in_the_way(tmp_path, monkeypatch, what, has_manifest):
    wanted = build_unmarked(tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    if not has_manifest:
        remove_folder(cache / ".trackbed")
    for path in cache.glob(f"*-GPTDataset-train-{what}"):
        zero(path)
    monkeypatch.setenv("TRACKBED_BOOT_ID", "after")
    assert content(build(config_of(tmp_path), SIZES)) == wanted
    entries = take_inventory(str(cache)).entries
    assert not any(entry.is_aside for entry in entries)
    assert {entry.condition.value for entry in entries} == {"whole"}


@contextlib.contextmanager
def loop_device(folder):
    """An ext4 file system of its own, mounted at the path that is given; skips where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a file system needs root and mkfs.ext4")
    image, mounted = folder / "disk.img", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(2 << 30)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if not mount(image, mounted):
        pytest.skip("a loop device cannot be mounted here")
    try:
        yield image, mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=False, capture_output=True)


def mount(image, mounted):
    done = subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=False, capture_output=True)
    return done.returncode == 0


def cut_power(mounted):
    descriptor = os.open(mounted, os.O_RDONLY)
    fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, "little"))
    os.close(descriptor)


def write_large_pair(prefix, documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    lengths = np.random.default_rng(0).integers(1, 4, documents)
    builder.add_documents(np.random.default_rng(1).integers(0, 99, int(lengths.sum())).astype(np.uint16), lengths)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def start(*arguments):
    """A process of `power_loss_rank.py`, which has begun to build when this returns."""
    command = [sys.executable, str(Path(__file__).parent / "power_loss_rank.py"), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begins\n"
    return process


def digest_of(cache, folder):
    """A digest of the samples that a start in a process of its own gives."""
    found, _ = start(cache, folder, "read").communicate(timeout=100)
    return found


def cut_while_building(tmp_path, monkeypatch, cuts, rng):
    """Cut the power at random moments; each next start must serve what a start without a cache does."""
    monkeypatch.setenv("TRACKBED_BOOT_ID", "at first")
    write_large_pair(tmp_path / "large", 1_300_000)
    write_pair(tmp_path / "small", rng.integers(1, 40, 2000))
    wanted = digest_of(tmp_path / "fresh", tmp_path)
    assert len(wanted) == 65
    unmarked = 0
    with loop_device(tmp_path) as (image, mounted):
        for cut in range(cuts):
            cache, flushes = mounted / f"cache{cut}", bool(rng.integers(2))
            monkeypatch.setenv("TRACKBED_BOOT_ID", f"before cut {cut}")
            process = start(cache, tmp_path, "flush" if flushes else "no-flush")
            time.sleep(0.05 + (1.5 * rng.random() if cut % 2 else 30 * rng.random() ** 4))
            cut_power(mounted)
            process.kill()
            process.communicate()
            subprocess.run(["umount", str(mounted)], check=True)
            assert mount(image, mounted)
            unmarked += not marks_in(cache)
            monkeypatch.setenv("TRACKBED_BOOT_ID", f"after cut {cut}")
            assert digest_of(cache, tmp_path) == wanted, cut
            entries = take_inventory(str(cache)).entries
            assert {entry.condition.value for entry in entries} == {"whole"}, cut
            assert not any(entry.is_aside for entry in entries), cut
            remove_folder(cache)
    return unmarked


def test_indices_survive_a_loss_of_power(tmp_path, monkeypatch):
    cut_while_building(tmp_path, monkeypatch, 1, np.random.default_rng(5))


@pytest.mark.slow
def test_indices_survive_a_hundred_losses_of_power(tmp_path, monkeypatch):
    assert cut_while_building(tmp_path, monkeypatch, 100, np.random.default_rng(6)) > 10
