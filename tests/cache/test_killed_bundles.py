"""Who builds a bundle is killed before each call that lets a file appear: the next builder ends as if undisturbed."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from small_entries import files_in, open_, problems

TESTS = str(Path(__file__).parents[1])
SEEDS = [1, 2, 3]
FILES = 5
"""Of an entry."""

PROGRAM = """
import sys
from contextlib import nullcontext
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from small_entries import arrays, entry, expected
from trackbed.cache import Recipe, bundles_of, collecting, make_together, open_or_build, together

folder, seeds = Path(sys.argv[1]), [1, 2, 3]
if sys.argv[2] == "named":
    together.is_on_this_machine = lambda _: False  # as on a file system that other hosts see, too
with collecting() as pending:
    for seed in seeds:
        open_or_build(
            entry(folder, seed=seed, stem=f"{seed:032x}-GPTDataset-train"),
            expected=expected,
            build=lambda _allocate, seed=seed: arrays(seed),
            recipe=Recipe(lambda seeds: [arrays(seed) for seed in seeds], seed),
        )
for bundle in bundles_of(pending):
    make_together(bundle, alone=nullcontext())
"""


def build(folder, way, *tracing):
    """Build the entries in a process; with the options of a tracer, under it."""
    traced = ["strace", "-f", "-o", f"{folder}.calls", *tracing] if tracing else []
    command = [*traced, sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), way, TESTS]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def count_calls(folder, way, calls):
    """How often a build that nobody disturbs makes these calls."""
    done = build(folder, way, "-e", f"trace={calls}")
    if "ptrace" in done.stderr:
        pytest.skip(f"this machine does not let tests trace: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    lines = Path(f"{folder}.calls").read_text().splitlines()
    return sum(line.split()[1].split("(")[0] in calls.split(",") for line in lines)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace kills at a call")
@pytest.mark.parametrize(
    ("way", "calls", "wanted"),
    [
        ("unnamed", "linkat", FILES * len(SEEDS)),
        ("named", "renameat2", len(SEEDS)),
        ("named", "renameat", (FILES - 1) * len(SEEDS)),
    ],
)
def test_a_bundle_that_is_cut_off_anywhere_is_finished_by_the_next_builder(tmp_path, way, calls, wanted):
    for seed in SEEDS:
        open_(tmp_path / "undisturbed", seed=seed, stem=f"{seed:032x}-GPTDataset-train")
    count = count_calls(tmp_path / "counted", way, calls)
    if count == 0:
        pytest.skip(f"this file system, or this kernel, does without {calls}")
    assert count == wanted
    for number in range(1, count + 1):
        folder = tmp_path / f"cache{number}"
        killed = build(folder, way, "-e", f"trace={calls}", "-e", f"inject={calls}:signal=SIGKILL:when={number}")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        for problem in problems(folder):
            assert "found the writer of this one dead" in problem or "as its manifest says, found nothing" in problem
        assert build(folder, way).returncode == 0
        assert files_in(folder) == files_in(tmp_path / "undisturbed")
        assert problems(folder) == []
