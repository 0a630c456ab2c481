"""What a start costs when every index is there: few system calls, nothing mapped, no descriptor kept."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, write_pair
from tests.support.tiers import slow_but

pytestmark = pytest.mark.dist

PAIR_CALLS = 9
"""System calls for each pair, of every rank: the header of the index, and the size of the data."""
ENTRY_CALLS = 10
"""System calls for each entry, of the one rank that looks it up: five files, and reading the manifest."""
CALLS = "trace=%file,%desc,mmap,munmap"

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support.files.blends import BlendedMegatronDatasetBuilder, GPTDataset, gpt_config
from pathlib import Path
from trackbed.comm import run_ranks

folder, count, size = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
prefixes = [f"{folder}/name{number}" for number in range(count)]
config = gpt_config(folder / "cache", blend=(prefixes, [1.0] * count), split="1")

def start(group):
    return BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, config, group=group).build()

def mapped():
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]

if size:
    ranks = run_ranks(size, start)
else:
    (train, _, _) = start(None)
    print(mapped())
    print(len(list(Path("/proc/self/fd").iterdir())))
    for position in range(50):
        train[position]
    print(sorted({name.rpartition(".")[2] for name in mapped()}))
"""


def link_pairs(folder, count):
    """One small pair under `count` names."""
    pair = write_pair(folder / "pair", [20] * 3000)  # files of several pages, which are mapped
    for number in range(count):
        for end in (".bin", ".idx"):
            Path(f"{folder}/name{number}{end}").symlink_to(f"{pair}{end}")
    return [f"{folder}/name{number}" for number in range(count)]


def build_cache(folder, count):
    """The indices that PROGRAM finds."""
    prefixes = [f"{folder}/name{number}" for number in range(count)]
    build(gpt_config(folder / "cache", blend=(prefixes, [1.0] * count), split="1"), [50, 0, 0])


def arguments(folder, count, size):
    return [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PROGRAM,
        str(ROOT),
        str(folder),
        *map(str, (count, size)),
    ]


def calls_of_start(folder, count, size):
    """System calls for files of a process with so many ranks."""
    traced = subprocess.run(
        ["strace", "-f", "-c", "-e", CALLS, "-o", f"{folder}/calls", *arguments(folder, count, size)],
        check=True,
        timeout=120,
    )
    assert traced.returncode == 0
    rows = [row.split() for row in Path(f"{folder}/calls").read_text().splitlines()[2:]]
    return sum(int(row[3]) for row in rows if row[-1] != "total" and row[0][0].isdigit())


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace counts the calls")
@pytest.mark.parametrize("size", slow_but([4], [1, 4]))
def test_a_warm_start_makes_a_bounded_number_of_system_calls(tmp_path, size):
    few, many = 100, 400
    link_pairs(tmp_path, many)
    calls = []
    for count in (few, many):
        build_cache(tmp_path, count)
        calls.append(calls_of_start(tmp_path, count, size))
    by_pair = (calls[1] - calls[0]) / (many - few) / size
    assert by_pair <= PAIR_CALLS + ENTRY_CALLS / size + 0.1


def test_a_warm_start_maps_nothing_before_the_first_sample(tmp_path):
    link_pairs(tmp_path, 50)
    build_cache(tmp_path, 50)
    found = subprocess.run(arguments(tmp_path, 50, 0), check=True, timeout=60, capture_output=True, text=True)
    before, _, after = found.stdout.splitlines()
    assert before == "[]"
    assert after == "['bin', 'idx', 'npy']"


def run_limited(folder, count, *, descriptors):
    """What PROGRAM prints where it may have so many descriptors open at a time."""
    limited = ["prlimit", f"--nofile={descriptors}", *arguments(folder, count, 0)]
    return subprocess.run(limited, check=True, timeout=300, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
def test_ten_thousand_datasets_that_were_built_open_with_few_descriptors(tmp_path):
    link_pairs(tmp_path, 10_000)
    run_limited(tmp_path, 10_000, descriptors=20_000)
    maps, descriptors, _ = run_limited(tmp_path, 10_000, descriptors=1024)
    assert maps == "[]"
    assert int(descriptors) < 100


@pytest.mark.slow
def test_ten_thousand_datasets_are_built_with_few_descriptors(tmp_path):
    link_pairs(tmp_path, 10_000)
    run_limited(tmp_path, 10_000, descriptors=1024)


def test_samples_of_many_datasets_are_read_with_few_descriptors(tmp_path):
    link_pairs(tmp_path, 50)
    build_cache(tmp_path, 50)
    run_limited(tmp_path, 50, descriptors=128)
