"""DTensors of any mesh and placement, saved and loaded by gloo processes, by Trackbed and by torch."""

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints.divided import layouts
from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "divided_rank.py"
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.uint8, torch.float8_e4m3fn, torch.float64]


@st.composite
def cases(draw, num_ranks):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    meshes = [mesh for mesh in [(1,), (2,), (4,), (2, 2), (1, 2), (2, 1)] if torch.Size(mesh).numel() <= num_ranks]
    before, after = (draw(layouts(len(shape), meshes)) for _ in range(2))
    return shape, draw(st.sampled_from(DTYPES)), before, after


@pytest.mark.parametrize(
    ("num_ranks", "count"),
    [(4, 10), pytest.param(2, 250, marks=pytest.mark.slow), pytest.param(4, 250, marks=pytest.mark.slow)],
)
def test_ranks_load_dtensors_of_any_layout_that_ranks_of_another_have_saved(num_ranks, count, tmp_path):
    collected = []

    @settings(max_examples=count, database=None)
    @given(cases(num_ranks))
    def collect(case):
        collected.append(case)

    collect()
    (tmp_path / "cases").write_bytes(pickle.dumps(collected))
    found = run_script(RANK, num_ranks, tmp_path / "cases", tmp_path, limit_seconds=100 + 2 * count)
    assert [lines[0]["cases"] for lines in found] == [len(collected)] * num_ranks
    assert min(lines[0]["with torch"] for lines in found) > 0


def test_what_lies_beside_dtensors_is_kept(tmp_path):
    found = run_script(Path(__file__).parent / "beside_rank.py", 2, tmp_path, limit_seconds=120)
    assert "tied" in found[0][0]


@pytest.mark.dist
@pytest.mark.slow
def test_a_resume_reads_what_a_rank_has_and_hardly_more(tmp_path):
    """In the layout that was saved, and in another one along the first axis. Checksums are of a MiB each."""
    for size in (2, 3):
        script = Path(__file__).with_name("read_bytes_rank.py")
        for ((read, own),) in run_script(script, size, tmp_path / "saved", limit_seconds=60):
            assert own >= 60 << 20
            assert own <= read <= 1.05 * own, (size, read / own)
