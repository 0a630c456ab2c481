"""What goes from a cache, in which order, and what an interrupted removal leaves."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.small_entries import STEM, collecting, files_in, open_, problems, seeds_in
from trackbed.cache import entries_in_use, plan_removal, remove, take_inventory
from trackbed.cache.npy import map_npy
from trackbed.files import new_partial

DAY = 86_400.0
STEMS = [f"{number:032x}-GPTDataset-train" for number in range(5)]


MAPPED_ROWS = 2000
"""Rows of arrays that are mapped: of a page or less, they are read into memory."""


def fill(folder, rows=10):
    """Five entries; number k was last used k + 2 days ago."""
    for days, stem in enumerate(STEMS):
        open_(folder, stem=stem, rows=rows)
        let_be_used(folder, stem, days + 2)


def let_be_used(folder, stem, days):
    for path in folder.rglob(f"{stem}*"):
        os.utime(path, (time.time() - days * DAY,) * 2)


def plan(folder, **options):
    return plan_removal(take_inventory(str(folder)), now=time.time(), **options)


def stems(removal):
    return [one.stem for one in removal.entries]


def collect_garbage(folder, **options):
    remove(plan(folder, **options))


def test_what_was_used_least_recently_goes_first_and_no_more_than_it_takes(tmp_path):
    fill(tmp_path)
    size = take_inventory(str(tmp_path)).entries[0].size_bytes
    assert stems(plan(tmp_path, keep_bytes=5 * size)) == []
    removal = plan(tmp_path, keep_bytes=3 * size - 1)
    assert stems(removal) == [STEMS[4], STEMS[3], STEMS[2]]
    assert (removal.size_bytes, removal.left_bytes) == (3 * size, 2 * size)
    remove(removal)
    assert sorted(one.stem for one in take_inventory(str(tmp_path)).entries) == STEMS[:2]
    assert problems(tmp_path) == []
    for stem in STEMS:
        assert seeds_in(open_(tmp_path, stem=stem)) == {1}


@given(
    keep=st.integers(0, 6000),
    unused_days=st.sampled_from([0, 1, 3, 5, 9]),
    in_use=st.sets(st.sampled_from(STEMS)),
)
def test_a_plan_keeps_what_it_must_and_stops_when_it_may(tmp_path_factory, keep, unused_days, in_use):
    folder = tmp_path_factory.getbasetemp() / "planned"
    if not folder.exists():
        fill(folder)
    paths = {f"{folder}/{stem}" for stem in in_use}
    removal = plan(folder, keep_bytes=keep, unused_for_seconds=unused_days * DAY, in_use=paths)
    goes = stems(removal)
    may_go = [stem for days, stem in enumerate(STEMS) if days + 2 >= unused_days and stem not in in_use]
    assert goes == may_go[::-1][: len(goes)]
    assert removal.left_bytes <= keep or goes == may_go[::-1]
    if goes:
        assert removal.left_bytes + removal.entries[-1].size_bytes > keep


def test_only_what_was_not_used_for_so_long_goes(tmp_path):
    fill(tmp_path)
    assert stems(plan(tmp_path, unused_for_seconds=4.5 * DAY)) == [STEMS[4], STEMS[3]]
    with collecting():
        open_(tmp_path, stem=STEMS[4])
    assert stems(plan(tmp_path, unused_for_seconds=4.5 * DAY)) == [STEMS[3]]


def test_what_was_used_within_a_day_stays_unless_said_otherwise(tmp_path):
    open_(tmp_path)
    assert stems(plan(tmp_path)) == []
    assert stems(plan(tmp_path, unused_for_seconds=0)) == [STEM]


def test_damaged_entries_go_before_all_others(tmp_path):
    fill(tmp_path)
    path = tmp_path / f"{STEMS[1]}-sample_index.npy"
    path.write_bytes(b"")
    let_be_used(tmp_path, STEMS[1], 3)
    size = take_inventory(str(tmp_path)).size_bytes
    assert stems(plan(tmp_path, keep_bytes=size - 1)) == [STEMS[1]]


@pytest.mark.parametrize("kind", ["no manifest", "another version"])
def test_what_is_not_known_to_be_ours_stays_unless_asked_for(tmp_path, kind):
    open_(tmp_path)
    manifest = tmp_path / ".trackbed" / f"{STEM}.json"
    if kind == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    assert stems(plan(tmp_path, unused_for_seconds=0)) == []
    collect_garbage(tmp_path, unused_for_seconds=0, foreign=True)
    assert files_in(tmp_path) == {}


def test_an_entry_that_lies_aside_goes_with_its_folder(tmp_path):
    open_(tmp_path)
    open_(tmp_path, seed=2)
    (aside,) = [one for one in take_inventory(str(tmp_path)).entries if one.is_aside]
    let_be_used(tmp_path, STEM, 5)
    for path in Path(aside.directory).iterdir():
        os.utime(path, (0, time.time() - 9 * DAY))
    collect_garbage(tmp_path, unused_for_seconds=7 * DAY)
    assert not Path(aside.directory).exists()
    assert seeds_in(open_(tmp_path)) == {1}


def test_removals_at_the_same_time_do_not_disturb_each_other(tmp_path):
    for turn in range(10):
        folder = tmp_path / f"cache{turn}"
        folder.mkdir()
        open_(folder)
        for seed in range(2, 22):
            open_(folder, seed=seed)  # each aside
        start = threading.Barrier(4)

        def collect(folder=folder, start=start):
            start.wait()
            for _ in range(5):
                collect_garbage(folder, unused_for_seconds=0)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(collect) for _ in range(4)]:
                done.result()
        assert [one for one in files_in(folder) if one.endswith(".npy")] == []


def test_a_folder_that_goes_while_the_cache_is_looked_at_is_passed_over(tmp_path, monkeypatch):
    open_(tmp_path)
    open_(tmp_path, seed=2)
    (aside,) = [one for one in take_inventory(str(tmp_path)).entries if one.is_aside]
    listed = os.listdir

    def list_and_remove(folder):
        names = listed(folder)
        if str(folder).endswith(".trackbed"):
            shutil.rmtree(aside.directory, ignore_errors=True)
        return names

    monkeypatch.setattr(os, "listdir", list_and_remove)
    assert [one.stem for one in take_inventory(str(tmp_path)).entries] == [STEM]


def test_dead_partial_files_always_go_and_others_stay(tmp_path):
    open_(tmp_path)
    partial = tmp_path / ".trackbed" / "partial"
    mine, dead = (
        new_partial(partial / "a.npy"),
        partial / new_partial(Path("b.npy")).name.replace(str(os.getpid()), "1" * 9),
    )
    foreign, forsaken = partial / "c.npy.elsewhere-1.1.1.0.partial", partial / "d.npy.elsewhere-1.1.1.0.partial"
    for path in (mine, dead, foreign, forsaken):
        path.touch()
    os.utime(forsaken, (0, time.time() - 8 * DAY))
    collect_garbage(tmp_path, keep_bytes=10**9)
    assert sorted(partial.iterdir()) == sorted([mine, foreign])


def test_notes_of_starts_go_when_they_say_nothing_any_more(tmp_path):
    fill(tmp_path)
    with collecting():
        open_(tmp_path, stem=STEMS[0])
    with collecting():
        open_(tmp_path, stem=STEMS[0])
        open_(tmp_path, stem=STEMS[1])
    uses = tmp_path / ".trackbed" / "uses"
    assert len(list(uses.iterdir())) == 2
    collect_garbage(tmp_path, keep_bytes=10**9)
    assert len(list(uses.iterdir())) == 1  # the later of the two says all
    collect_garbage(tmp_path, unused_for_seconds=0)
    assert list(uses.iterdir()) == []


def test_a_file_that_was_replaced_since_the_plan_stays(tmp_path):
    fill(tmp_path)
    removal = plan(tmp_path)
    replaced = tmp_path / f"{STEMS[0]}-sample_index.npy"
    copy = tmp_path / "copy"
    copy.write_bytes(replaced.read_bytes())
    copy.rename(replaced)
    remove(removal)
    assert replaced.exists()


READER = """
import sys, time
from trackbed.cache.npy import map_npy
array = map_npy(sys.argv[1])
print(int(array[0, 0]), flush=True)
sys.stdin.readline()
print(int(array.sum()), flush=True)
"""


def test_an_entry_that_another_process_has_mapped_is_in_use_and_stays_readable_even_without_its_file(tmp_path):
    fill(tmp_path, MAPPED_ROWS)
    path = tmp_path / f"{STEMS[3]}-sample_index.npy"
    with subprocess.Popen(
        [sys.executable, "-c", READER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout.readline() == "1\n"
        in_use = entries_in_use(take_inventory(str(tmp_path)))
        assert in_use == {f"{tmp_path}/{STEMS[3]}"}
        collect_garbage(tmp_path, in_use=in_use)
        assert path.exists()
        collect_garbage(tmp_path)
        assert not path.exists()
        print(file=reader.stdin, flush=True)
        assert reader.stdout.readline() == f"{2 * (MAPPED_ROWS + 1)}\n"
    assert entries_in_use(take_inventory(str(tmp_path))) == set()


def test_what_this_process_has_mapped_is_in_use(tmp_path):
    open_(tmp_path, rows=MAPPED_ROWS)
    mapped = map_npy(tmp_path / f"{STEM}-document_index.npy")
    assert entries_in_use(take_inventory(str(tmp_path))) == {f"{tmp_path}/{STEM}"}
    del mapped
    assert entries_in_use(take_inventory(str(tmp_path))) == set()


KILLED = """
import os, signal, sys, time
from trackbed.cache import plan_removal, remove, take_inventory
removal = plan_removal(take_inventory(sys.argv[1]), now=time.time(), unused_for_seconds=0)
steps = 0
def look(event, arguments):
    global steps
    if event == "os.remove":
        if steps == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1
sys.addaudithook(look)
remove(removal)
"""


@pytest.mark.parametrize("next_seed", [1, 2])
@pytest.mark.parametrize("removed", range(5))
def test_a_removal_that_is_killed_leaves_nothing_that_is_served(tmp_path, removed, next_seed):
    open_(tmp_path)
    undisturbed = files_in(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, str(removed)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(files_in(tmp_path)) == 5 - removed
    assert len(problems(tmp_path)) == (1 if removed else 0)
    builds = []
    found = open_(tmp_path, seed=next_seed, build=lambda _: builds.append(1) or open_(tmp_path / "x", seed=next_seed))
    assert seeds_in(found) == {next_seed}
    assert len(builds) == (1 if removed or next_seed == 2 else 0)
    if next_seed == 1:
        assert files_in(tmp_path / "x" if builds else tmp_path) == undisturbed
    collect_garbage(tmp_path, unused_for_seconds=0, foreign=True)
    assert take_inventory(str(tmp_path)).entries == ()
