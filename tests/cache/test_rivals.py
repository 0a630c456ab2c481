"""Several builders in one folder: each gets what it asked for, whoever comes first, and whoever is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from small_entries import STEM, entry, files_in, open_, problems, seeds_in
from trackbed.cache import take_inventory

TESTS = str(Path(__file__).parents[1])

# Runs `after` just before the file system is changed for the n-th time, n = argv[2]; says how often it was changed.
STEPS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from small_entries import open_, seeds_in
from trackbed.cache import await_flush

folder, stop, steps, inside = Path(sys.argv[1]), int(sys.argv[2]), 0, False

def look(event, arguments):
    global steps, inside
    if inside or event not in ("os.link", "os.rename", "os.remove", "os.mkdir", "open"):
        return
    if event == "open" and not (arguments[2] & os.O_CREAT):
        return
    if not str(arguments[0]).startswith(str(folder)):
        return
    if steps == stop:
        inside = True
        {after}
        inside = False
    steps += 1

sys.addaudithook(look)
found = open_(folder, seed=int(sys.argv[3]))
assert seeds_in(found) == {{int(sys.argv[3])}}, seeds_in(found)
await_flush()
inside = True
print(steps)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RIVAL = "assert seeds_in(open_(folder, seed=2)) == {2}"


def run_steps(folder, stop, after, *, seed=1):
    command = [sys.executable, "-c", STEPS.format(after=after), str(folder), str(stop), str(seed), TESTS]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def all_steps(tmp_path):
    """How often a build changes the file system."""
    done = run_steps(tmp_path / "steps", -1, "pass")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("next_seed", [1, 2])
def test_a_builder_killed_before_any_step_leaves_nothing_that_is_served_for_something_else(tmp_path, next_seed):
    steps = all_steps(tmp_path)
    assert steps > 8
    for stop in range(steps):
        folder = tmp_path / f"cache{stop}"
        assert run_steps(folder, stop, KILL).returncode == -signal.SIGKILL
        assert seeds_in(open_(folder, seed=next_seed)) == {next_seed}
        assert seeds_in(open_(folder, seed=1)) == {1}
        assert problems(folder) == []


def test_a_killed_builders_work_is_finished_by_the_next_as_if_nothing_had_been(tmp_path):
    open_(tmp_path / "undisturbed")
    steps = all_steps(tmp_path)
    for stop in range(steps):
        folder = tmp_path / f"cache{stop}"
        run_steps(folder, stop, KILL)
        for problem in problems(folder) if folder.exists() else []:
            assert "found the writer of this one dead" in problem or "as its manifest says, found nothing" in problem
        open_(folder)
        assert files_in(folder) == files_in(tmp_path / "undisturbed")


def test_a_rival_that_builds_before_any_step_of_ours_gets_its_own_and_leaves_ours_alone(tmp_path):
    for stop in range(all_steps(tmp_path)):
        folder = tmp_path / f"cache{stop}"
        done = run_steps(folder, stop, RIVAL)
        assert done.returncode == 0, done.stderr
        assert seeds_in(open_(folder, seed=1)) == {1}
        assert seeds_in(open_(folder, seed=2)) == {2}
        assert problems(folder) == []
        assert sorted(one.is_aside for one in take_inventory(str(folder)).entries) == [False, True]


# Another builder of our entry meets it half-written, and before one of its steps a builder of another entry comes.
TWO_RIVALS = (
    "import subprocess; "
    'subprocess.run([sys.executable, "-c", {program!r}, str(folder), {stop!r}, "1", sys.argv[4]], check=True)'
)
SLOW = pytest.mark.slow


@pytest.mark.parametrize("left", [3, pytest.param(2, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_a_half_written_entry_that_is_built_again_does_not_give_its_name_away(tmp_path, left):
    steps = all_steps(tmp_path)
    seen = []
    for stop in range(steps):
        folder = tmp_path / f"cache{stop}"
        after = TWO_RIVALS.format(program=STEPS.format(after=RIVAL), stop=str(stop))
        done = run_steps(folder, steps - left, after)
        assert done.returncode == 0, done.stderr
        assert seeds_in(open_(folder, seed=1)) == {1}
        assert seeds_in(open_(folder, seed=2)) == {2}
        assert problems(folder) == []
        seen.append(sum(one.is_aside for one in take_inventory(str(folder)).entries))
    assert set(seen) == {1}


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


def test_where_there_are_no_hard_links_a_name_is_still_claimed(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert seeds_in(open_(tmp_path, build=lambda _: open_(tmp_path, seed=2) and open_(tmp_path / "other"))) == {1}
    assert seeds_in(open_(tmp_path, seed=2)) == {2}
    assert [one.is_aside for one in take_inventory(str(tmp_path)).entries] == [True, False]
    assert problems(tmp_path) == []


# Of each round there is a folder; whoever has built waits there for the others.
ROUNDS = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from small_entries import open_, seeds_in
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
        subprocess.Popen([sys.executable, "-c", ROUNDS, tmp_path, str(seed), str(rounds), TESTS, str(len(seeds))])
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
