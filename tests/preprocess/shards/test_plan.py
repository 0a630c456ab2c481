import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.preprocess.inputs import Compression, InputFile, InputFormat
from trackbed.preprocess.shards.partition import MAX_SHARDS, is_cut_anywhere, plan_shards

FILES = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=12)


def plan_of(files, shard_bytes):
    return plan_shards([size for size, _ in files], [cut for _, cut in files], shard_bytes=shard_bytes)


@given(FILES, st.integers(1, 60))
def test_every_byte_of_a_file_that_is_cut_lies_in_the_shard_of_its_offset(files, shard_bytes):
    plan = plan_of(files, shard_bytes)
    starts = list(accumulate((size for size, _ in files), initial=0))
    found = {}
    for shard in range(len(plan)):
        for file, start, stop in plan.ranges(shard):
            if files[file][1]:
                assert start < stop
                found.update({(file, at): shard for at in range(start, stop)})
    offsets = {(n, at): starts[n] + at for n, (size, cut) in enumerate(files) if cut for at in range(size)}
    wanted = {key: offset // shard_bytes for key, offset in offsets.items()}
    assert found == wanted


@given(FILES, st.integers(1, 60))
def test_every_other_file_lies_whole_in_the_shard_of_its_first_byte(files, shard_bytes):
    plan = plan_of(files, shard_bytes)
    starts = list(accumulate((size for size, _ in files), initial=0))
    found = [(one, shard) for shard in range(len(plan)) for one in plan.ranges(shard) if not files[one.file][1]]
    whole = [number for number, (_, cut) in enumerate(files) if not cut]
    assert [one.file for one, _ in found] == whole
    for (file, start, stop), shard in found:
        assert (start, stop) == (0, files[file][0])
        assert shard == min(starts[file] // shard_bytes, len(plan) - 1)


@given(FILES, st.integers(1, 60))
def test_the_sizes_of_the_shards_add_up_to_the_input(files, shard_bytes):
    plan = plan_of(files, shard_bytes)
    sizes = [plan.size_bytes(shard) for shard in range(len(plan))]
    assert sum(sizes) == plan.total_bytes == sum(size for size, _ in files)
    assert all(size == shard_bytes for size in sizes[:-1])


def test_an_input_without_bytes_is_one_shard():
    plan = plan_shards([0, 0], [True, False], shard_bytes=10)
    assert len(plan) == 1
    assert [one.file for one in plan.ranges(0)] == [1]


def test_too_many_shards_are_refused_with_a_size_that_suffices():
    with pytest.raises(ArgumentError, match=r"at least 2 for 2,000,000 bytes of input, found 1"):
        plan_shards([2 * MAX_SHARDS], [True], shard_bytes=1)
    assert len(plan_shards([2 * MAX_SHARDS], [True], shard_bytes=2)) == MAX_SHARDS


PLANS = """
import re, time
from pathlib import Path
from trackbed.preprocess.inputs import InputFile, InputFormat
from trackbed.preprocess.shards.partition import is_cut_anywhere, plan_shards

begin = time.monotonic()
files = [
    InputFile(Path(f"/corpus/{n % 500:03}/part-{n:06}.jsonl"), InputFormat.JSON_LINES, n * 7919 % 10_000 * 200_000)
    for n in range(200_000)
]
plan = plan_shards([file.size_bytes for file in files], list(map(is_cut_anywhere, files)), shard_bytes=4 * 10**9)
covered = sum(stop - start for shard in range(len(plan)) for _, start, stop in plan.ranges(shard))
seconds = time.monotonic() - begin
(most_kib,) = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(covered, plan.total_bytes, seconds, most_kib)
"""


def test_200_tb_in_200_000_files_are_planned_in_ten_seconds_and_a_gib():
    found = subprocess.run([sys.executable, "-c", PLANS], check=True, capture_output=True, text=True).stdout.split()
    covered, total, most_kib = int(found[0]), int(found[1]), int(found[3])
    assert covered == total > 199 * 10**12
    assert float(found[2]) < 10
    assert most_kib < 1 << 20


@pytest.mark.parametrize(
    ("format_", "compression", "wanted"),
    [
        (InputFormat.JSON_LINES, Compression.NONE, True),
        (InputFormat.JSON_LINES, Compression.GZIP, False),
        (InputFormat.PLAIN_TEXT, Compression.NONE, False),
        (InputFormat.PARQUET, Compression.NONE, False),
    ],
)
def test_only_json_lines_that_are_not_packed_are_cut(format_, compression, wanted):
    assert is_cut_anywhere(InputFile(Path("a"), format_, 1, compression)) is wanted
