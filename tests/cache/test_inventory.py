"""What is said of a cache: each entry, its condition, and everything that is wrong."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.files.small_entries import ARRAYS, STEM, arrays, collecting, entry, open_, problems
from trackbed.cache import Condition, await_flush, bytes_to_read, find_problems, take_inventory
from trackbed.files import Writer, new_partial

MEGATRON = "f" * 32


def entries(folder):
    return take_inventory(str(folder)).entries


def write_as_megatron(folder, stem=f"{MEGATRON}-GPTDataset-valid"):
    """An entry as Megatron Core leaves it."""
    (folder / f"{stem}-description.txt").write_text("{}")
    for name, array in arrays().items():
        np.save(folder / f"{stem}-{name}.npy", array)


def test_entries_of_every_kind_are_described(tmp_path):
    open_(tmp_path)
    open_(tmp_path, seed=2)
    open_(tmp_path, stem="balanced", megatron=False)
    write_as_megatron(tmp_path)
    (tmp_path / "somebody's-file.npy").write_bytes(b"")
    found = entries(tmp_path)
    shared = [(one.class_name, one.split, bool(one.fingerprint)) for one in found if not one.is_aside]
    assert sorted(shared) == [("GPTDataset", "train", True), ("GPTDataset", "valid", False)]
    assert sorted(one.stem for one in found if one.is_aside) == [STEM, "balanced"]
    assert {one.condition for one in found} == {Condition.whole}
    assert len({one.fingerprint for one in found if one.stem == STEM}) == 2
    assert all(len(one.files) == 4 for one in found)
    assert not any("somebody" in file.path for one in found for file in one.files)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "notes")
    assert sum(one.size_bytes for one in found) == take_inventory(str(tmp_path)).size_bytes == written
    assert problems(tmp_path) == []


def test_a_folder_with_nothing_in_it_has_no_entries(tmp_path):
    assert entries(tmp_path) == ()
    assert problems(tmp_path) == []


def break_array(change):
    def damage(folder):
        path = folder / f"{STEM}-sample_index.npy"
        path.write_bytes(change(path.read_bytes()))

    return damage


def replace_fingerprint(folder):
    path = Path(entry(folder).shared.manifest)
    path.write_text(json.dumps({**json.loads(path.read_text()), "decisions": {"seed": 3}}))


DAMAGE = {
    "cut": (
        break_array(lambda raw: raw[:100]),
        "sample_index.npy: must have 216 bytes, as its manifest says, found 100",
    ),
    "emptied": (break_array(lambda _: b""), "sample_index.npy: must have 216 bytes, as its manifest says, found 0"),
    "gone": (
        lambda folder: (folder / f"{STEM}-shuffle_index.npy").unlink(),
        "shuffle_index.npy: must be there, as its manifest says, found nothing",
    ),
    "a number changed": (break_array(lambda raw: raw[:-1] + b"\1"), "sample_index.npy: must have the CRC-32"),
    "another header": (
        break_array(lambda raw: raw.replace(b"<i4", b"<u4")),
        "sample_index.npy: must hold int32 of shape (11, 2), found uint32 of shape (11, 2)",
    ),
    "no header": (break_array(lambda raw: b"\xff" * len(raw)), "sample_index.npy: a .npy of version 1.0 must begin"),
    "unreadable manifest": (
        lambda folder: Path(entry(folder).shared.manifest).write_text("{"),
        f"{STEM}.json: a manifest must be a JSON object",
    ),
    "other decisions": (replace_fingerprint, f"{STEM}.json: the fingerprint must be that of the decisions"),
    "a dead writer": (
        lambda folder: dead_partial(folder).touch(),
        "a partial file must have a living writer, found that this one's has died",
    ),
}


def dead_partial(folder):
    """The name of a partial file whose writer is no more."""
    name = new_partial(Path("f.npy")).name.replace(f".{os.getpid()}.", ".4194305.")
    return folder / ".trackbed" / "partial" / name


@pytest.mark.parametrize("kind", DAMAGE)
def test_whatever_is_wrong_is_found_and_names_the_file(tmp_path, kind):
    open_(tmp_path)
    open_(tmp_path, stem=STEM.replace("train", "valid"))
    damage, says = DAMAGE[kind]
    damage(tmp_path)
    found = problems(tmp_path)
    assert any(says in problem for problem in found), found
    assert all(problem.startswith(str(tmp_path)) for problem in found)
    assert len(found) <= 2


def test_every_byte_of_an_entry_counts(tmp_path):
    open_(tmp_path)
    for path in [*tmp_path.glob(f"{STEM}*"), Path(entry(tmp_path).shared.manifest)]:
        whole = path.read_bytes()
        for at in range(0, len(whole), 7):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            found = problems(tmp_path)
            # A manifest does not sum itself up: some of its bytes are names of fields that may be missing, or spaces.
            assert found or path.suffix == ".json", (path, at)
        path.write_bytes(whole)
    assert problems(tmp_path) == []


@pytest.mark.parametrize("size", [0, 100, 150, 215])
def test_an_entry_without_a_manifest_is_judged_by_its_headers(tmp_path, size):
    write_as_megatron(tmp_path)
    assert problems(tmp_path) == []
    path = tmp_path / f"{MEGATRON}-GPTDataset-valid-sample_index.npy"
    path.write_bytes(path.read_bytes()[:size])
    (problem,) = problems(tmp_path)
    assert problem.startswith(str(path))


@pytest.mark.parametrize("name", ["description.txt", *(f"{name}.npy" for name in ARRAYS)])
def test_an_entry_without_a_manifest_must_have_all_its_files(tmp_path, name):
    write_as_megatron(tmp_path)
    (tmp_path / f"{MEGATRON}-GPTDataset-valid-{name}").unlink()
    (one,) = entries(tmp_path)
    assert one.condition is Condition.damaged
    assert "must have a description and all arrays of an index" in one.problems[0]


def test_nothing_is_said_of_an_entry_of_another_version(tmp_path):
    open_(tmp_path)
    path = Path(entry(tmp_path).shared.manifest)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    (tmp_path / f"{STEM}-sample_index.npy").write_bytes(b"")
    (one,) = entries(tmp_path)
    assert (one.condition, one.record, one.problems) == (Condition.unknown, None, ())
    assert problems(tmp_path) == []


def test_partial_files_are_those_of_living_and_dead_writers_and_of_other_hosts(tmp_path):
    open_(tmp_path)
    partial = tmp_path / ".trackbed" / "partial"
    new_partial(partial / "a.npy").touch()
    dead_partial(tmp_path).touch()
    (partial / "b.npy.elsewhere-1.1.1.0.partial").touch()
    found = {one.writer for one in take_inventory(str(tmp_path)).partials}
    assert found == {Writer.living, Writer.dead, Writer.elsewhere}
    assert len(problems(tmp_path)) == 1


def test_progress_ends_at_the_bytes_that_were_announced(tmp_path):
    open_(tmp_path)
    inventory, seen = take_inventory(str(tmp_path)), []
    assert list(find_problems(inventory, progress=seen.append)) == []
    assert sum(seen) == bytes_to_read(inventory) == sum(p.stat().st_size for p in tmp_path.glob(f"{STEM}*"))


def test_the_chunks_of_a_large_file_are_compared_one_by_one(tmp_path):
    def build(_allocate):
        return {**arrays(), "sample_index": np.zeros((10_000_000, 2), np.int32)}

    open_(tmp_path, build=build)
    assert problems(tmp_path) == []
    with (tmp_path / f"{STEM}-sample_index.npy").open("r+b") as file:
        file.seek(70_000_000)
        file.write(b"\1")
    (problem,) = problems(tmp_path)
    assert "in chunk 1, found" in problem


def age(folder, seconds):
    """Let every file of a cache be so old."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds,) * 2)


def test_the_last_use_of_an_entry_is_the_latest_start_that_collected_it(tmp_path):
    other = STEM.replace("train", "valid")
    open_(tmp_path)
    open_(tmp_path, stem=other)
    open_(tmp_path, stem="balanced", megatron=False)
    age(tmp_path, 1e6)
    before = {one.stem: one.last_used for one in entries(tmp_path)}
    with collecting() as pending:
        open_(tmp_path, stem=other)
        open_(tmp_path, stem="balanced", megatron=False)
    assert len(pending) == 2
    after = {one.stem: one.last_used for one in entries(tmp_path)}
    assert after[STEM] == before[STEM]
    for stem in (other, "balanced"):
        assert abs(after[stem] - time.time()) < 60


def test_a_start_within_a_day_of_the_same_start_writes_nothing(tmp_path):
    open_(tmp_path)
    await_flush()  # which leaves a note
    times = []
    for old in (0, 1000, 100_000):
        age(tmp_path, old)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / ".trackbed").rglob("*")}
        with collecting():
            open_(tmp_path)
        after = {path: path.stat().st_mtime_ns for path in (tmp_path / ".trackbed").rglob("*")}
        times.append(sum(after[path] != before.get(path) for path in after if path.is_file()))
    assert times == [1, 0, 1]
    assert len(list((tmp_path / ".trackbed" / "uses").iterdir())) == 1


def test_a_folder_that_only_megatron_core_has_written_to_is_left_as_it_is(tmp_path):
    write_as_megatron(tmp_path, STEM)
    (tmp_path / f"{STEM}-description.txt").write_text("what it is")
    before = sorted(tmp_path.rglob("*"))
    with collecting():
        open_(tmp_path)
    open_(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
