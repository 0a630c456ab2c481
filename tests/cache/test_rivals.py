"""Several builders in one folder: each gets what it asked for, whoever comes first, and whoever is killed."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.files.small_entries import STEM, entry, files_in, open_, problems, seeds_in
from tests.support.models.stepping import CALLS, WAYS, finish, pause_at, start, steps
from tests.support.tiers import slow_but
from trackbed.cache import take_inventory


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace stops at a call")
@pytest.mark.parametrize("way", slow_but(["unnamed"], WAYS))
def test_a_rival_that_builds_before_any_step_of_ours_gets_its_own_and_leaves_ours_alone(tmp_path, way):
    for call, number in steps(tmp_path / "counted", way, {STEM: 1}):
        folder = tmp_path / f"{call}{number}"
        rival = partial(open_, folder, seed=2)
        pause_at(folder, way, {STEM: 1}, call, number, lambda rival=rival: seeds_in(rival()))
        assert seeds_in(open_(folder, seed=1)) == {1}
        assert seeds_in(open_(folder, seed=2)) == {2}
        assert problems(folder) == []
        assert sorted(one.is_aside for one in take_inventory(str(folder)).entries) == [False, True]


# The calls by which a builder lets its files appear.
APPEAR = {"unnamed": "linkat", "named": "rename"}


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace stops at a call")
@pytest.mark.parametrize(
    ("way", "first", "calls"),
    [
        pytest.param(WAYS[0], 3, ("linkat", "rename"), id="some"),
        *(
            pytest.param(way, first, CALLS, id=f"{way}-{first}", marks=pytest.mark.slow)
            for way in WAYS
            for first in (1, 3, 4)
        ),
    ],
)
def test_a_half_written_entry_that_is_built_again_does_not_give_its_name_away(tmp_path, way, first, calls):
    """One builder waits in the middle; a second one of the same entry meets that, and waits in turn for a third."""
    for call in calls:
        for number in range(1, 7):
            folder = tmp_path / f"{call}{number}"
            rival = partial(open_, folder, seed=2)
            came = []

            def second(folder=folder, call=call, number=number, rival=rival, came=came):
                came.append(pause_at(folder, "unnamed", {STEM: 1}, call, number, lambda: seeds_in(rival())))

            assert pause_at(folder, way, {STEM: 1}, APPEAR[way], first, second)
            assert seeds_in(open_(folder, seed=1)) == {1}
            assert seeds_in(open_(folder, seed=2)) == {2}
            assert problems(folder) == []
            if not came[0]:
                break


def test_a_second_builder_of_the_same_entry_leaves_the_first_ones_files(tmp_path):
    seen = []

    def build(_allocate):
        seen.append(open_(tmp_path))
        seen.append({path: path.stat().st_ino for path in tmp_path.glob("*")})
        return seen[0]

    assert seeds_in(open_(tmp_path, build=build)) == {1}
    assert {path: path.stat().st_ino for path in tmp_path.glob("*")} == seen[1]
    assert problems(tmp_path) == []
    assert not list((tmp_path / ".trackbed" / "partial").iterdir())


def test_a_name_that_was_claimed_and_never_filled_is_somebody_elses(tmp_path, caplog):
    open_(tmp_path)
    for path in tmp_path.glob(f"{STEM}*"):
        path.unlink()
    assert seeds_in(open_(tmp_path, seed=2)) == {2}
    assert "seed: 1, now 2" in caplog.text
    assert not list(tmp_path.glob(f"{STEM}*"))
    again = []
    assert seeds_in(open_(tmp_path, seed=2, build=lambda _: again.append(1))) == {2}
    assert seeds_in(open_(tmp_path)) == {1}
    assert problems(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 300])
def test_a_manifest_that_nobody_can_read_is_replaced_by_whoever_builds(tmp_path, content):
    open_(tmp_path)
    undisturbed = files_in(tmp_path)
    Path(entry(tmp_path).shared.manifest).write_bytes(content)
    (tmp_path / f"{STEM}-sample_index.npy").write_bytes(b"")
    assert seeds_in(open_(tmp_path)) == {1}
    assert files_in(tmp_path) == undisturbed


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes calls fail")
def test_where_there_are_no_hard_links_a_name_is_still_claimed(tmp_path):
    refused = ["-e", "trace=linkat,renameat2", "-e", "inject=linkat:error=EPERM", "-e", "inject=renameat2:error=EINVAL"]
    for seed in (1, 2):
        process = start(tmp_path / "cache", "named", {STEM: seed}, *refused)
        assert "Error" not in finish(process)
    assert seeds_in(open_(tmp_path / "cache", seed=1)) == {1}
    assert seeds_in(open_(tmp_path / "cache", seed=2)) == {2}
    assert [one.is_aside for one in take_inventory(str(tmp_path / "cache")).entries] == [True, False]
    assert problems(tmp_path / "cache") == []


# Of each round there is a folder; whoever has built waits there for the others.
ROUNDS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from tests.support.files.small_entries import open_, seeds_in
from trackbed.cache import await_flush

base, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for turn in range(rounds):
    gate = base / f"gate{turn}"
    gate.mkdir(exist_ok=True)
    (gate / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir(gate)) < int(sys.argv[5]) and time.monotonic() < deadline:
        time.sleep(0)
    for turns in range(2):
        found = open_(base / f"cache{turn}", seed=seed)
        assert seeds_in(found) == {seed}, (turn, seed, seeds_in(found))
"""


@pytest.mark.parametrize("rounds", [5, pytest.param(500, marks=pytest.mark.slow)])
def test_builders_of_different_entries_under_one_name_never_mix_them(tmp_path, rounds):
    seeds = [1, 2, 3, 1, 2, 3]
    processes = [
        subprocess.Popen([sys.executable, "-c", ROUNDS, tmp_path, str(seed), str(rounds), str(ROOT), str(len(seeds))])
        for seed in seeds
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * len(seeds)
    finally:  # one that fails leaves the others waiting
        for process in processes:
            process.kill()
            process.wait()
    for turn in range(rounds):
        folder = tmp_path / f"cache{turn}"
        assert [seeds_in(open_(folder, seed=seed)) for seed in (1, 2, 3)] == [{1}, {2}, {3}]
        assert problems(folder) == []
