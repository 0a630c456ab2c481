"""Small entries that are built in one call: the same files as one by one, and whatever is in the way is dealt with."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest

from small_entries import ARRAYS, arrays, entry, expected, files_in, open_, problems, seeds_in
from trackbed.cache import Recipe, bundles_of, collecting, find_together, make_together, open_or_build, take_inventory
from trackbed.cache.look import look_together
from trackbed.errors import CacheError

MANY = 100


def stem_of(number):
    return f"{number:032x}-GPTDataset-train"


def build_all(seeds):
    """The arrays of many entries; a seed of 0 stands for one that is not small."""
    return [arrays(seed, 10 + seed % 3) if seed else None for seed in seeds]


def collect(folder, seeds, *, build=build_all, **options):
    """Pending entries with these seeds, each under a name of its own."""
    with collecting() as pending:
        for number, seed in enumerate(seeds):
            open_or_build(
                entry(folder, seed=seed, stem=stem_of(number), **options),
                expected=lambda seed=seed: expected(10 + seed % 3),
                build=lambda _allocate, seed=seed: arrays(seed, 10 + seed % 3),
                recipe=Recipe(build, seed),
            )
    return list(pending)


class Alone:
    """Counts how often it is entered."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        self.count += 1

    def __exit__(self, *_):
        pass


def make(pending):
    """Build all; returns how many were built alone."""
    alone = Alone()
    for bundle in bundles_of(pending):
        make_together(bundle, alone=alone)
    return alone.count


def undisturbed(folder, seeds):
    """The files that entries have that were built one by one."""
    for number, seed in enumerate(seeds):
        open_(folder, seed=seed, rows=10 + seed % 3, stem=stem_of(number))
    return files_in(folder)


def check(folder, tmp_path, pending, seeds):
    """All are there, as if they had been built one by one."""
    assert [seeds_in(one) for one in pending] == [{seed} for seed in seeds]
    assert files_in(folder) == undisturbed(tmp_path / "undisturbed", seeds)
    assert problems(folder) == []


def test_bundles_grow_and_hold_what_can_be_built_together(tmp_path):
    pending = collect(tmp_path, [1] * 200)
    assert [len(bundle) for bundle in bundles_of(pending)] == [1, 2, 4, 8, *[16] * 11, 9]
    assert [one for bundle in bundles_of(pending) for one in bundle] == pending
    others = collect(tmp_path / "other", [1] * 3) + collect(tmp_path / "other", [1] * 3, build=lambda _: [])
    with collecting() as alone:
        open_(tmp_path, seed=5)
    assert [len(bundle) for bundle in bundles_of([*pending[:5], *others, *alone, *pending[:2]])] == [
        1,
        2,
        2,
        3,
        3,
        1,
        1,
        1,
    ]
    assert bundles_of([]) == []


def test_entries_built_together_are_those_built_one_by_one(tmp_path):
    seeds = list(range(1, MANY + 1))
    calls = []

    def build(ingredients):
        calls.append(len(ingredients))
        return build_all(ingredients)

    pending = collect(tmp_path / "cache", seeds, build=build)
    assert find_together(pending) == [False] * MANY
    assert make(pending) == 0
    assert not list((tmp_path / "cache" / ".trackbed" / "partial").iterdir())
    assert calls == [1, 2, 4, 8, *[16] * 5, 5]
    assert all(one.is_open for one in pending)
    check(tmp_path / "cache", tmp_path, pending, seeds)


def test_what_was_not_looked_for_is_looked_for_first(tmp_path):
    seeds = list(range(1, 30))
    undisturbed(tmp_path / "cache", seeds[:10])
    before = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    pending = collect(tmp_path / "cache", seeds)
    make(pending)
    check(tmp_path / "cache", tmp_path, pending, seeds)
    assert before.items() <= {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*")}.items()


def test_what_a_rival_built_since_the_look_is_left_as_it_is(tmp_path):
    seeds = [1] * 40
    pending = collect(tmp_path / "cache", seeds)
    assert not any(find_together(pending))
    undisturbed(tmp_path / "cache", seeds[:20])
    before = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    make(pending)
    check(tmp_path / "cache", tmp_path, pending, seeds)
    assert before.items() <= {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*")}.items()


def test_a_rival_with_other_entries_under_the_same_names_keeps_them(tmp_path):
    folder = tmp_path / "cache"
    pending = collect(folder, range(1, 21))
    assert not any(find_together(pending))
    for number in range(20):
        open_(folder, seed=100 + number, stem=stem_of(number))
    make(pending)
    assert [seeds_in(one) for one in pending] == [{seed} for seed in range(1, 21)]
    for number in range(20):
        assert seeds_in(open_(folder, seed=100 + number, stem=stem_of(number))) == {100 + number}
    assert sorted(one.is_aside for one in take_inventory(str(folder)).entries) == [False] * 20 + [True] * 20
    assert problems(folder) == []


def test_files_of_megatron_core_that_came_since_the_look_give_way(tmp_path):
    folder = tmp_path / "cache"
    pending = collect(folder, [1] * 8)
    assert not any(find_together(pending))
    folder.mkdir()
    for number in range(8):
        (folder / f"{stem_of(number)}-sample_index.npy").write_bytes(b"half of it")
    make(pending)
    check(folder, tmp_path, pending, [1] * 8)


def test_what_is_there_damaged_is_built_anew(tmp_path):
    folder = tmp_path / "cache"
    undisturbed(folder, [1] * 8)
    for number in range(4):
        (folder / f"{stem_of(number)}-shuffle_index.npy").unlink()
    (folder / f"{stem_of(5)}-shuffle_index.npy").write_bytes(b"")
    pending = collect(folder, [1] * 8)
    assert find_together(pending) == [*[False] * 4, True, False, True, True]
    make(pending)
    check(folder, tmp_path, pending, [1] * 8)


def manifest_of(folder):
    return folder / ".trackbed" / f"{stem_of(0)}.json"


def edit_manifest(folder, **fields):
    """Write it once more with other fields; None for one that it shall lack."""
    old = json.loads(manifest_of(folder).read_bytes())
    new = {name: value for name, value in {**old, **fields}.items() if value is not None}
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
    "a manifest of an older Trackbed": lambda folder: edit_manifest(folder, arrays=None),
    "a manifest of a newer one": lambda folder: edit_manifest(folder, version=99),
    "a manifest of another entry": lambda folder: edit_manifest(folder, fingerprint="0" * 64),
    "a manifest of 1 MiB": lambda folder: edit_manifest(folder, more=" " * (1 << 20)),
}


THERE = ("whole", "no manifest, as of Megatron Core", "a manifest of an older Trackbed", "a manifest of 1 MiB")


@pytest.mark.parametrize("state", STATES)
def test_what_is_found_together_is_what_is_found_alone(tmp_path, state):
    folder = tmp_path / "cache"
    undisturbed(folder, [1] * 3)
    STATES[state](folder)
    together, alone = collect(folder, [1] * 3), collect(folder, [1] * 3)
    needs_closer_look = [one is None for one in look_together([one.entry for one in together], [False] * len(together))]
    assert any(needs_closer_look) == (state not in ("whole", "absent"))
    found = find_together(together)
    assert found == [one.find() for one in alone] == [one.is_open for one in together]
    assert found[0] == (state in THERE)
    assert [one.was_absent for one in together] == [one.was_absent for one in alone]
    if all(found):
        for one, other in zip(together, alone, strict=True):
            assert one.see()._replace(stamps=None) == other.see()._replace(stamps=None)
            assert one.see().stamps.tolist() == other.see().stamps.tolist()
            assert seeds_in(one) == {1}


def test_entries_that_are_not_small_are_built_one_by_one(tmp_path):
    seeds = [0 if number % 3 == 0 else number for number in range(50)]
    pending = collect(tmp_path / "cache", seeds)
    assert make(pending) == 17
    check(tmp_path / "cache", tmp_path, pending, seeds)


def test_entries_that_megatron_core_cannot_read_lie_aside(tmp_path):
    pending = collect(tmp_path / "cache", range(1, 9), megatron=False)
    assert find_together(pending) == [False] * 8
    make(pending)
    assert [seeds_in(one) for one in pending] == [{seed} for seed in range(1, 9)]
    assert [one.is_aside for one in take_inventory(str(tmp_path / "cache")).entries] == [True] * 8


def test_what_building_raises_goes_up(tmp_path):
    def build(ingredients):
        raise ValueError(len(ingredients))

    with pytest.raises(ValueError, match="1"):
        make(collect(tmp_path / "cache", [1] * 8, build=build))
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_named_and_what_was_built_before_is_whole(small_disk):
    disk = small_disk("300k")
    pending = collect(disk, list(range(1, 200)))
    with pytest.raises(CacheError, match="No space left on device"):
        make(pending)
    assert problems(disk) == []
    assert not list(Path(disk, ".trackbed", "partial").iterdir())
    assert 0 < len(take_inventory(str(disk)).entries) < 199


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "cache").write_bytes(b"a file")
    with pytest.raises(CacheError, match="cannot be written: File exists; path_to_cache must name a folder"):
        make(collect(tmp_path / "cache", [1] * 8))


def test_a_folder_that_can_only_be_read_is_named(tmp_path, read_only):
    (tmp_path / "cache").mkdir()
    view = read_only(tmp_path / "cache")
    with pytest.raises(CacheError, match="Read-only file system"):
        make(collect(view, [1] * 8))


def test_arrays_need_not_be_in_c_order(tmp_path):
    def build(ingredients):
        return [{name: np.asfortranarray(array) for name, array in arrays(seed).items()} for seed in ingredients]

    folder = tmp_path / "cache"
    pending = collect(folder, [3] * 4, build=build)
    make(pending)
    check(folder, tmp_path, pending, [3] * 4)
    assert set(pending[3]) == set(ARRAYS)


def test_a_cache_that_cannot_be_looked_at_is_named_when_it_is_built(tmp_path):
    folder = tmp_path / ("n" * 300)
    pending = collect(folder, [1] * 8)
    assert find_together(pending) == [False] * 8
    with pytest.raises(CacheError, match="cannot be written: File name too long"):
        make(pending)
