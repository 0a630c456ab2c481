"""No name below a cache appears or goes after `build()` has returned, while indices are still being flushed."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.files.blends import build, gpt_config, write_pairs
from tests.support.files.tidy import remove_folder
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.cache import await_flush, plan_removal, take_inventory
from trackbed.cache.notes import find_note_files, flush_later, read_notes
from trackbed.comm.threads import run_ranks
from trackbed.datasets import GPTDataset

SIZES = (60, 6, 6)


@pytest.fixture
def held_flush(monkeypatch):
    """A flush that ends when the event is set."""
    event = threading.Event()
    monkeypatch.setattr("trackbed.files.writeback.flush_file_system", lambda folder: event.wait(60))
    yield event
    event.set()
    await_flush()


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def config_of(folder, order="megatron", **options):
    return gpt_config(folder / "cache", blend=(write_pairs(folder), [3, 2, 1]), split="8,1,1", order=order, **options)


@pytest.mark.parametrize("order", ["megatron", "balanced"])
def test_the_flush_of_a_build_makes_renames_and_removes_no_name(tmp_path, held_flush, order):
    build(config_of(tmp_path, order), SIZES)
    before = names_in(tmp_path)
    held_flush.set()
    await_flush()
    assert names_in(tmp_path) == before
    (mark,) = find_note_files(str(tmp_path / "cache" / ".trackbed"))
    assert len(mark.digests) >= 6


def test_each_build_makes_one_mark_however_many_entries_it_has(tmp_path, held_flush):
    build(config_of(tmp_path), SIZES)
    assert len(list((tmp_path / "cache" / ".trackbed" / "notes").iterdir())) == 1


def test_a_cache_that_is_removed_before_the_flush_stays_removed(tmp_path, held_flush, caplog):
    build(config_of(tmp_path), SIZES)
    shutil.rmtree(tmp_path / "cache")
    held_flush.set()
    await_flush()
    assert not (tmp_path / "cache").exists()
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("gone", [".trackbed", ".trackbed/notes", ".trackbed/notes/*"])
def test_parts_of_a_cache_that_are_removed_before_the_flush_stay_removed(tmp_path, held_flush, gone):
    build(config_of(tmp_path), SIZES)
    for path in list((tmp_path / "cache").glob(gone)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = names_in(tmp_path)
    held_flush.set()
    await_flush()
    assert names_in(tmp_path) == before


def test_a_cache_can_be_removed_while_the_flush_ends(tmp_path):
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        build(config_of(folder), SIZES)
        shutil.rmtree(folder / "cache")
        await_flush()
        assert not (folder / "cache").exists()


def test_a_start_from_another_boot_makes_no_name_later_either(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKBED_BOOT_ID", "before")
    build(config_of(tmp_path), SIZES)
    await_flush()
    remove_folder(tmp_path / "cache" / ".trackbed" / "notes")
    monkeypatch.setenv("TRACKBED_BOOT_ID", "after")
    event = threading.Event()
    monkeypatch.setattr("trackbed.files.writeback.flush_file_system", lambda folder: event.wait(60))
    build(config_of(tmp_path), SIZES)
    before = names_in(tmp_path)
    event.set()
    await_flush()
    assert names_in(tmp_path) == before
    assert len(find_note_files(str(tmp_path / "cache" / ".trackbed"))[0].digests) >= 6


def test_all_names_are_there_when_the_first_of_several_ranks_returns(tmp_path, held_flush):
    config = config_of(tmp_path)

    def start(group):
        BlendedMegatronDatasetBuilder(GPTDataset, list(SIZES), lambda: True, config, group=group).build()
        return names_in(tmp_path)

    first, *others = run_ranks(3, start)
    held_flush.set()
    await_flush()
    assert all(names == first for names in others)
    assert names_in(tmp_path) == first


@pytest.mark.parametrize("torn", [b"", b"flushed", b"flushed 0123", bytes(200)])
def test_a_torn_mark_marks_nothing_and_a_whole_one_does(tmp_path, monkeypatch, torn):
    monkeypatch.setenv("TRACKBED_BOOT_ID", "before")
    build(config_of(tmp_path), SIZES)
    await_flush()
    (mark,) = (tmp_path / "cache" / ".trackbed" / "notes").iterdir()
    whole = mark.read_bytes()
    mark.write_bytes(torn)
    monkeypatch.setenv("TRACKBED_BOOT_ID", "after")
    compared = []
    monkeypatch.setattr("trackbed.cache.lookup.compare_chunks", lambda chunks: compared.append(list(chunks)) or [])
    build(config_of(tmp_path), SIZES)
    assert compared
    await_flush()
    assert whole in [path.read_bytes() for path in mark.parent.iterdir()]
    monkeypatch.setenv("TRACKBED_BOOT_ID", "later")
    compared.clear()
    build(config_of(tmp_path), SIZES)
    assert compared == []


def test_notes_that_were_read_before_the_flush_are_read_again_after_it(tmp_path, held_flush):
    build(config_of(tmp_path), SIZES)
    own = str(tmp_path / "cache" / ".trackbed")
    assert read_notes(own) == frozenset()
    threading.Event().wait(0.02)  # longer than the resolution of the file system's clock
    held_flush.set()
    await_flush()
    assert len(read_notes(own)) >= 6


def test_a_mark_that_waits_for_its_flush_is_not_removed_as_unused(tmp_path, held_flush):
    build(config_of(tmp_path), SIZES)
    inventory = take_inventory(str(tmp_path / "cache"))
    now = inventory.notes[0].last_written
    assert plan_removal(inventory, now=now + 3600).notes == ()
    assert plan_removal(inventory, now=now + 100_000).notes == inventory.notes


def test_a_cache_that_cannot_be_written_to_is_flushed_without_a_mark(tmp_path, held_flush):
    own = tmp_path / ".trackbed"
    own.mkdir()
    (own / "notes").write_text("in the way")
    flush_later([(str(own), np.zeros((1, 3), dtype=np.int64))])
    held_flush.set()
    await_flush()
    assert names_in(tmp_path) == [".trackbed", ".trackbed/notes"]
