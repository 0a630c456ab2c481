"""Saved and loaded by gloo processes, in generated layouts and with every exchange."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints.states import shardings, worlds
from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "layout_rank.py"


@st.composite
def layouts(draw):
    wrapped = draw(st.sampled_from([None, None, "broadcast", "gather_rounds", "gather_object"]))
    sizes = st.sampled_from([1, 2, 4]) if wrapped is None else st.just(4)
    world = draw(worlds())
    before, after = (draw(shardings(world, draw(sizes))) for _ in range(2))
    return world, before, after, draw(st.sampled_from(["none", "flat", "auto"])), wrapped


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.slow)])
def test_processes_load_what_other_numbers_of_processes_have_saved(count, tmp_path):
    cases = []

    @settings(max_examples=count, database=None)
    @given(layouts())
    def collect(case):
        cases.append(case)

    collect()
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    found = run_script(RANK, 4, tmp_path / "cases", tmp_path, limit_seconds=60 + count)
    assert found == [[{"cases": len(cases)}]] * 4
