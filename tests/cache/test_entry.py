"""What happens to an entry that is there, damaged, somebody else's, or not there."""

import errno
import json
import os
import threading
import time
import zlib

import numpy as np
import pytest

from tests.support.files.small_entries import request
from trackbed.cache import ArraySpec, Entry
from trackbed.cache import build as building
from trackbed.datasets.start import Start, open_index
from trackbed.errors import CacheError
from trackbed.files import checksum, writeback

NUMBERS = np.arange(10, dtype=np.int32)


class Builder:
    """Builds the entry, and counts how often it was asked to."""

    def __init__(self, numbers=NUMBERS):
        self.numbers = numbers
        self.builds = 0

    def __call__(self, allocate):
        self.builds += 1
        return {"numbers": self.numbers, "none": np.empty((0, 2), dtype=np.int64)}


def entry(folder, *, seed=1, megatron=True):
    return Entry(
        directory=folder,
        stem="abc-GPTDataset-train",
        description="what it is",
        arrays=("numbers", "none"),
        decisions={"seed": seed},
        megatron=megatron,
    )


def expected():
    return {"numbers": ArraySpec(np.dtype(np.int32), (10,)), "none": ArraySpec(np.dtype(np.int64), (0, 2))}


def open_(folder, build, **options):
    return open_index(request(entry(folder, **options), build=build, wants=expected))


def numbers_file(folder):
    return folder / "abc-GPTDataset-train-numbers.npy"


def manifest(folder):
    return folder / ".trackbed" / "abc-GPTDataset-train.json"


def test_an_entry_is_built_once_and_then_opened(tmp_path):
    build = Builder()
    first, again = open_(tmp_path, build), open_(tmp_path, build)
    assert build.builds == 1
    assert first["numbers"].tolist() == again["numbers"].tolist() == NUMBERS.tolist()
    assert again["none"].shape == (0, 2)


def test_files_are_what_numpy_saves(tmp_path):
    open_(tmp_path, Builder())
    np.save(tmp_path / "wanted.npy", NUMBERS)
    assert numbers_file(tmp_path).read_bytes() == (tmp_path / "wanted.npy").read_bytes()
    assert (tmp_path / "abc-GPTDataset-train-description.txt").read_text() == "what it is"


def test_nothing_but_the_entry_and_its_manifest_is_left(tmp_path):
    open_(tmp_path, Builder())
    found = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    files = sorted(str(path) for path in found if path.parent.name != "notes")
    stem = "abc-GPTDataset-train"
    assert files == [f".trackbed/{stem}.json", *(f"{stem}-{n}" for n in ("description.txt", "none.npy", "numbers.npy"))]


def test_what_is_opened_cannot_be_written_to(tmp_path):
    with pytest.raises(ValueError, match="read-only"):
        open_(tmp_path, Builder())["numbers"][0] = 5


def test_an_entry_without_a_manifest_is_served_if_it_looks_right(tmp_path):
    build = Builder()
    open_(tmp_path, build)
    manifest(tmp_path).unlink()
    open_(tmp_path, build)
    assert build.builds == 1
    assert not manifest(tmp_path).exists()


def test_files_whose_manifest_is_damaged_may_be_for_other_decisions_and_are_rebuilt_in_place(tmp_path):
    build = Builder()
    open_(tmp_path, build)
    whole = manifest(tmp_path).read_bytes()
    manifest(tmp_path).write_bytes(whole[:40])
    open_(tmp_path, build)
    assert build.builds == 2
    assert manifest(tmp_path).read_bytes() == whole
    assert not list((tmp_path / ".trackbed").glob("*/*.npy"))


@pytest.mark.parametrize("keep_manifest", [True, False])
@pytest.mark.parametrize("size", [0, 5, 100, 130, 167])
def test_a_file_that_was_cut_is_rebuilt_in_place(tmp_path, size, keep_manifest):
    build = Builder()
    open_(tmp_path, build)
    whole = numbers_file(tmp_path).read_bytes()
    assert len(whole) == 168
    numbers_file(tmp_path).write_bytes(whole[:size])
    if not keep_manifest:
        manifest(tmp_path).unlink()
    assert open_(tmp_path, build)["numbers"].tolist() == NUMBERS.tolist()
    assert build.builds == 2
    assert numbers_file(tmp_path).read_bytes() == whole
    assert not list((tmp_path / ".trackbed").glob("*/*.npy"))


@pytest.mark.parametrize("name", ["numbers.npy", "none.npy", "description.txt"])
@pytest.mark.parametrize("keep_manifest", [True, False])
def test_a_file_that_is_gone_is_rebuilt(tmp_path, name, keep_manifest):
    build = Builder()
    open_(tmp_path, build)
    (tmp_path / f"abc-GPTDataset-train-{name}").unlink()
    if not keep_manifest:
        manifest(tmp_path).unlink()
    open_(tmp_path, build)
    assert build.builds == 2
    assert (tmp_path / f"abc-GPTDataset-train-{name}").exists()


def test_a_header_that_was_overwritten_is_an_error_at_the_first_read_that_says_what_to_do(tmp_path):
    build = Builder()
    open_(tmp_path, build)
    numbers_file(tmp_path).write_bytes(b"\xff" * 168)
    opened = open_(tmp_path, build)
    with pytest.raises(CacheError, match=r"numbers\.npy: a \.npy .* remove it and start again"):
        opened["numbers"]
    numbers_file(tmp_path).unlink()
    assert open_(tmp_path, build)["numbers"].tolist() == NUMBERS.tolist()
    assert build.builds == 2


def test_an_entry_of_other_decisions_stays_and_ours_is_built_beside_it(tmp_path, caplog):
    old, new = Builder(), Builder(NUMBERS[::-1].copy())
    open_(tmp_path, old)
    before = numbers_file(tmp_path).read_bytes()
    for _ in range(2):
        assert open_(tmp_path, new, seed=2)["numbers"].tolist() == NUMBERS.tolist()[::-1]
    assert (old.builds, new.builds) == (1, 1)
    assert numbers_file(tmp_path).read_bytes() == before
    assert "seed: 1, now 2" in caplog.text
    assert open_(tmp_path, old)["numbers"].tolist() == NUMBERS.tolist()
    assert old.builds == 1


def test_a_foreign_entry_that_looks_different_stays(tmp_path, caplog):
    np.save(numbers_file(tmp_path), np.arange(11, dtype=np.int32))
    before = numbers_file(tmp_path).read_bytes()
    build = Builder()
    open_(tmp_path, build)
    assert numbers_file(tmp_path).read_bytes() == before
    assert "int32 of shape (11,), not int32 of shape (10,)" in caplog.text


def test_an_entry_of_another_version_stays(tmp_path):
    build = Builder()
    open_(tmp_path, build)
    fields = json.loads(manifest(tmp_path).read_text())
    manifest(tmp_path).write_text(json.dumps({**fields, "version": 99}))
    open_(tmp_path, build)
    assert build.builds == 2
    assert json.loads(manifest(tmp_path).read_text())["version"] == 99


def test_an_entry_that_megatron_core_cannot_read_lies_under_its_fingerprint(tmp_path):
    open_(tmp_path, Builder(), megatron=False)
    assert not list(tmp_path.glob("*.npy"))
    assert list((tmp_path / ".trackbed" / entry(tmp_path).fingerprint).glob("*.npy"))


def test_where_building_is_not_allowed_a_missing_entry_is_an_error_with_advice(tmp_path):
    with Start(open_only="build it first").active(), pytest.raises(CacheError, match="build it first"):
        open_(tmp_path, Builder())
    assert not list(tmp_path.iterdir())


def test_where_building_is_not_allowed_a_whole_entry_is_opened(tmp_path):
    open_(tmp_path, Builder())
    with Start(open_only="build it first").active():
        assert len(open_(tmp_path, Builder())["numbers"]) == 10


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"file.*cannot be written.*path_to_cache must name a folder"):
        open_(tmp_path / "file" / "cache", Builder())


def test_a_failed_build_leaves_nothing(tmp_path):
    class Failing(Builder):
        def __call__(self, allocate):
            return {"numbers": NUMBERS}  # and no "none"

    with pytest.raises(KeyError):
        open_(tmp_path, Failing())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


LARGE = {"numbers": ArraySpec(np.dtype(np.int32), (2_000_001,)), "none": ArraySpec(np.dtype(np.int64), (0, 2))}


def fill_large(allocate):
    numbers = allocate("numbers", (2_000_001,), np.int32)
    numbers[:] = np.arange(len(numbers))
    return {"numbers": numbers, "none": allocate("none", (0, 2), np.int64)}


def test_a_large_array_is_filled_in_its_file(tmp_path):
    seen = []

    def build(allocate):
        arrays = fill_large(allocate)
        seen.extend(path.stat().st_size for path in (tmp_path / ".trackbed" / "partial").iterdir())
        return arrays

    opened = open_index(request(entry(tmp_path), build=build, wants=lambda: LARGE))
    assert seen == [128 + 4 * 2_000_001]
    assert np.array_equal(opened["numbers"], np.arange(2_000_001))
    np.save(tmp_path / "wanted.npy", np.arange(2_000_001, dtype=np.int32))
    assert numbers_file(tmp_path).read_bytes() == (tmp_path / "wanted.npy").read_bytes()
    numbers_file(tmp_path).write_bytes(b"damaged")
    again = open_index(request(entry(tmp_path), build=fill_large, wants=lambda: LARGE))
    assert np.array_equal(again["numbers"], np.arange(2_000_001))


def test_an_array_of_the_builders_own_replaces_the_one_that_it_asked_for(tmp_path):
    def build(allocate):
        return {**fill_large(allocate), "numbers": np.zeros(2_000_001, np.int32)}

    opened = open_index(request(entry(tmp_path), build=build, wants=lambda: LARGE))
    assert not opened["numbers"].any()


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt, RuntimeError])
def test_a_build_that_fails_half_way_leaves_nothing(tmp_path, failure):
    def build(allocate):
        fill_large(allocate)
        raise failure

    with pytest.raises(failure):
        open_index(request(entry(tmp_path), build=build, wants=lambda: LARGE))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("says_how_far", [True, False])
def test_a_very_large_array_is_written_out_behind(tmp_path, monkeypatch, says_how_far):
    monkeypatch.setattr(building, "_BACKGROUND_BYTES", 4 << 20)
    monkeypatch.setattr(writeback, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(checksum, "CHUNK_BYTES", 1 << 20)
    seen = []

    def build(allocate):
        numbers = allocate("numbers", (2_000_001,), np.int32)
        for start in range(0, 2_000_001, 100_000):
            numbers[start : start + 100_000] = np.arange(start, min(start + 100_000, 2_000_001))
            if says_how_far:
                allocate.filled(start + 100_000, "numbers", "none")
            time.sleep(0.01)
        seen.append(numbers[:1000].sum())  # what was given back can still be read
        return {"numbers": numbers, "none": allocate("none", (0, 2), np.int64)}

    opened = open_index(request(entry(tmp_path), build=build, wants=lambda: LARGE))
    assert np.array_equal(opened["numbers"], np.arange(2_000_001))
    assert seen == [499_500]
    record = json.loads(manifest(tmp_path).read_text())["files"]["abc-GPTDataset-train-numbers.npy"]
    data = numbers_file(tmp_path).read_bytes()
    assert record["crc32"] == [f"{zlib.crc32(data[at : at + (1 << 20)]):08x}" for at in range(0, len(data), 1 << 20)]


def test_a_failed_build_of_a_very_large_array_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "_BACKGROUND_BYTES", 4 << 20)

    def build(allocate):
        fill_large(allocate)
        allocate.filled(5, "numbers")
        raise RuntimeError

    before = threading.active_count()
    with pytest.raises(RuntimeError):
        open_index(request(entry(tmp_path), build=build, wants=lambda: LARGE))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_map_gets_its_arrays_by_writing(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    arrays = open_index(request(entry(tmp_path), build=fill_large, wants=lambda: LARGE))
    assert np.array_equal(arrays["numbers"], np.arange(2_000_001))
