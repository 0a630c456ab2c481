"""Small entries that are built in one call: the same files as one by one, and whatever is in the way is dealt with."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.support.files.small_entries import (
    ARRAYS,
    SmallKind,
    arrays,
    build_all,
    entry,
    files_in,
    lazy,
    open_,
    problems,
    seeds_in,
)
from trackbed.cache import State, await_flush, look_up, take_inventory
from trackbed.errors import CacheError

MANY = 100


def stem_of(number):
    return f"{number:032x}-GPTDataset-train"


def rows_of(seed):
    return 10 + seed % 3


def want(folder, seeds, *, kind=None, **options):
    """Small entries with these seeds, each under a name of its own."""
    kind = kind or SmallKind(rows=rows_of)
    return [
        lazy(kind.request(entry(folder, seed=seed, stem=stem_of(number), **options), seed))
        for number, seed in enumerate(seeds)
    ]


def find(wanted):
    """Look entries up. Returns whether each of them is there."""
    for one, found in zip(wanted, look_up([one.request for one in wanted]), strict=True):
        one.note(found)
    return [one.is_resolved for one in wanted]


def undisturbed(folder, seeds):
    """The files that entries have that were built one by one."""
    for number, seed in enumerate(seeds):
        open_(folder, seed=seed, rows=10 + seed % 3, stem=stem_of(number))
    return files_in(folder)


def check(folder, tmp_path, wanted, seeds):
    """All are there, as if they had been built one by one."""
    assert [seeds_in(one) for one in wanted] == [{seed} for seed in seeds]
    assert files_in(folder) == undisturbed(tmp_path / "undisturbed", seeds)
    assert problems(folder) == []


def test_entries_built_together_are_those_built_one_by_one(tmp_path):
    seeds = list(range(1, MANY + 1))
    calls = []

    def build_small(some):
        calls.append(len(some))
        return [arrays(seed, rows_of(seed)) for seed in some]

    wanted = want(tmp_path / "cache", seeds, kind=SmallKind(build_small, rows_of))
    assert find(wanted) == [False] * MANY
    build_all(wanted)
    assert not list((tmp_path / "cache" / ".trackbed" / "partial").iterdir())
    assert calls == [1, 2, 4, 8, *[16] * 5, 5]
    assert all(one.is_resolved for one in wanted)
    check(tmp_path / "cache", tmp_path, wanted, seeds)


def test_the_same_entry_may_be_wanted_twice_in_a_batch(tmp_path):
    kind = SmallKind(rows=rows_of)
    wanted = [lazy(kind.request(entry(tmp_path / "cache"), 3)) for _ in range(5)]
    assert not any(find(wanted))
    build_all(wanted)
    assert [seeds_in(one) for one in wanted] == [{3}] * 5
    assert problems(tmp_path / "cache") == []


def test_what_was_not_looked_for_is_looked_for_first(tmp_path):
    seeds = list(range(1, 30))
    undisturbed(tmp_path / "cache", seeds[:10])
    before = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    wanted = want(tmp_path / "cache", seeds)
    build_all(wanted)
    check(tmp_path / "cache", tmp_path, wanted, seeds)
    assert before.items() <= {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*")}.items()


def test_what_a_rival_built_since_the_look_is_left_as_it_is(tmp_path):
    seeds = [1] * 40
    wanted = want(tmp_path / "cache", seeds)
    assert not any(find(wanted))
    undisturbed(tmp_path / "cache", seeds[:20])
    before = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    build_all(wanted)
    check(tmp_path / "cache", tmp_path, wanted, seeds)
    assert before.items() <= {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*")}.items()


def test_a_rival_with_other_entries_under_the_same_names_keeps_them(tmp_path):
    folder = tmp_path / "cache"
    wanted = want(folder, range(1, 21))
    assert not any(find(wanted))
    for number in range(20):
        open_(folder, seed=100 + number, stem=stem_of(number))
    build_all(wanted)
    assert [seeds_in(one) for one in wanted] == [{seed} for seed in range(1, 21)]
    for number in range(20):
        assert seeds_in(open_(folder, seed=100 + number, stem=stem_of(number))) == {100 + number}
    assert sorted(one.is_aside for one in take_inventory(str(folder)).entries) == [False] * 20 + [True] * 20
    assert problems(folder) == []


def test_files_of_megatron_core_that_came_since_the_look_give_way(tmp_path):
    folder = tmp_path / "cache"
    wanted = want(folder, [1] * 8)
    assert not any(find(wanted))
    folder.mkdir()
    for number in range(8):
        (folder / f"{stem_of(number)}-sample_index.npy").write_bytes(b"half of it")
    build_all(wanted)
    check(folder, tmp_path, wanted, [1] * 8)


def test_what_is_there_damaged_is_built_anew(tmp_path):
    folder = tmp_path / "cache"
    undisturbed(folder, [1] * 8)
    for number in range(4):
        (folder / f"{stem_of(number)}-shuffle_index.npy").unlink()
    (folder / f"{stem_of(5)}-shuffle_index.npy").write_bytes(b"")
    wanted = want(folder, [1] * 8)
    assert find(wanted) == [*[False] * 4, True, False, True, True]
    build_all(wanted)
    check(folder, tmp_path, wanted, [1] * 8)


def manifest_of(folder):
    return folder / ".trackbed" / f"{stem_of(0)}.json"


def edit_manifest(folder, **fields):
    """Write it once more with other fields; None for one that it shall lack."""
    old = json.loads(manifest_of(folder).read_bytes())
    new = {name: value for name, value in {**old, **fields}.items() if name not in fields or value is not None}
    manifest_of(folder).write_bytes(orjson.dumps(new))


def file_names():
    """Of all files of the first entry but its manifest."""
    return [f"{stem_of(0)}-description.txt", *[f"{stem_of(0)}-{name}.npy" for name in ARRAYS]]


STATES = {
    "whole": lambda _folder: None,
    "absent": shutil.rmtree,
    "an array is gone": lambda folder: (folder / f"{stem_of(0)}-sample_index.npy").unlink(),
    "an array is cut": lambda folder: os.truncate(folder / f"{stem_of(0)}-sample_index.npy", 130),
    "no manifest, as of Megatron Core": lambda folder: manifest_of(folder).unlink(),
    "nothing but the manifest": lambda folder: [(folder / name).unlink() for name in file_names()],
    "a manifest that is cut": lambda folder: os.truncate(manifest_of(folder), 100),
    "nothing but a manifest that is cut": lambda folder: (
        STATES["nothing but the manifest"](folder),
        os.truncate(manifest_of(folder), 100),
    ),
    "a manifest that knows no size": lambda folder: (
        edit_manifest(folder, files={name: {"size_bytes": -1, "crc32": []} for name in file_names()}),
        STATES["nothing but the manifest"](folder),
    ),
    "an empty manifest": lambda folder: os.truncate(manifest_of(folder), 0),
    "a folder for a manifest": lambda folder: (manifest_of(folder).unlink(), manifest_of(folder).mkdir()),
    "a manifest of a development version, without arrays": lambda folder: edit_manifest(folder, arrays=None),
    "a manifest of a newer one": lambda folder: edit_manifest(folder, version=99),
    "a manifest of another entry": lambda folder: edit_manifest(folder, fingerprint="0" * 64),
    "a manifest of 1 MiB": lambda folder: edit_manifest(folder, more=" " * (1 << 20)),
}


THERE = ("whole", "no manifest, as of Megatron Core", "a manifest of 1 MiB")


@pytest.mark.parametrize("state", STATES)
def test_what_is_found_together_is_what_is_found_alone(tmp_path, state):
    folder = tmp_path / "cache"
    undisturbed(folder, [1] * 3)
    await_flush()  # which leaves a note
    STATES[state](folder)
    together, alone = want(folder, [1] * 3), want(folder, [1] * 3)
    found = find(together)
    assert found == [find([one])[0] for one in alone]
    assert found[0] == (state in THERE)
    assert found[1:] == [state != "absent"] * 2
    for one, other in zip(together, alone, strict=True):
        assert one.found._replace(stamps=None) == other.found._replace(stamps=None)
        assert np.array_equal(one.found.stamps, other.found.stamps)
    if all(found):
        assert [seeds_in(one) for one in together] == [{1}] * 3


STATES_FOUND = {
    "an array is gone": State.damaged,
    "an array is cut": State.damaged,
    "nothing but the manifest": State.damaged,
    "a manifest that is cut": State.damaged,
    "nothing but a manifest that is cut": State.absent,
    "a manifest that knows no size": State.absent,
    "an empty manifest": State.damaged,
    "a folder for a manifest": State.damaged,
}


@pytest.mark.parametrize("state", STATES_FOUND)
def test_what_is_not_there_has_a_state_and_a_reason(tmp_path, state):
    undisturbed(tmp_path / "cache", [1] * 3)
    STATES[state](tmp_path / "cache")
    (found,) = look_up([want(tmp_path / "cache", [1])[0].request])
    assert found.state is STATES_FOUND[state]
    assert found.why.startswith(str(tmp_path))


def test_entries_that_are_not_small_are_built_one_by_one(tmp_path):
    seeds = [0 if number % 3 == 0 else number for number in range(50)]
    kind = SmallKind(rows=rows_of)
    wanted = want(tmp_path / "cache", seeds, kind=kind)
    build_all(wanted)
    assert kind.alone == 17
    check(tmp_path / "cache", tmp_path, wanted, seeds)


def test_entries_that_megatron_core_cannot_read_lie_aside(tmp_path):
    wanted = want(tmp_path / "cache", range(1, 9), megatron=False)
    assert find(wanted) == [False] * 8
    build_all(wanted)
    assert [seeds_in(one) for one in wanted] == [{seed} for seed in range(1, 9)]
    assert [one.is_aside for one in take_inventory(str(tmp_path / "cache")).entries] == [True] * 8


def test_what_building_raises_goes_up(tmp_path):
    def build(ingredients):
        raise ValueError(len(ingredients))

    with pytest.raises(ValueError, match="1"):
        build_all(want(tmp_path / "cache", [1] * 8, kind=SmallKind(build)))
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_named_and_what_was_built_before_is_whole(small_disk):
    disk = small_disk("300k")
    wanted = want(disk, list(range(1, 200)))
    with pytest.raises(CacheError, match="No space left on device"):
        build_all(wanted)
    assert problems(disk) == []
    assert not list(Path(disk, ".trackbed", "partial").iterdir())
    assert 0 < len(take_inventory(str(disk)).entries) < 199


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "cache").write_bytes(b"a file")
    with pytest.raises(CacheError, match="cannot be written: File exists; path_to_cache must name a folder"):
        build_all(want(tmp_path / "cache", [1] * 8))


def test_a_folder_that_can_only_be_read_is_named(tmp_path, read_only):
    (tmp_path / "cache").mkdir()
    view = read_only(tmp_path / "cache")
    with pytest.raises(CacheError, match="Read-only file system"):
        build_all(want(view, [1] * 8))


def test_arrays_need_not_be_in_c_order(tmp_path):
    def build(ingredients):
        return [{name: np.asfortranarray(array) for name, array in arrays(seed).items()} for seed in ingredients]

    folder = tmp_path / "cache"
    wanted = want(folder, [3] * 4, kind=SmallKind(build))
    build_all(wanted)
    check(folder, tmp_path, wanted, [3] * 4)
    assert set(wanted[3]) == set(ARRAYS)


def test_a_cache_that_cannot_be_examined_is_named(tmp_path):
    wanted = want(tmp_path / ("n" * 300), [1] * 8)
    for act in (find, build_all):
        with pytest.raises(CacheError, match="cannot be looked up: File name too long; path_to_cache must name"):
            act(wanted)
