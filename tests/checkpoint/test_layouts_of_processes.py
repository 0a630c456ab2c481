"""Saved to folders and addresses, and loaded, by gloo processes, in generated layouts and with every exchange."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints.states import shardings, worlds
from tests.support.processes.launching import run_script
from tests.support.stores.servers import FolderPlace

RANK = Path(__file__).parent / "layout_rank.py"


@st.composite
def layouts(draw, wrappers):
    wrapped = draw(st.sampled_from(wrappers))
    sizes = st.sampled_from([1, 2, 4]) if wrapped is None else st.just(4)
    world = draw(worlds())
    before, after = (draw(shardings(world, draw(sizes))) for _ in range(2))
    return world, before, after, draw(st.sampled_from(["none", "flat", "auto"])), wrapped


@pytest.mark.parametrize("count", [4, pytest.param(1000, marks=pytest.mark.slow)])
def test_processes_load_what_other_numbers_of_processes_have_saved(count, place, tmp_path):
    cases = []
    # Megatron's wrappers take folders alone.
    wrappers = [None, None, "broadcast", "gather_rounds", "gather_object"] if isinstance(place, FolderPlace) else [None]

    @settings(max_examples=count, database=None)
    @given(layouts(wrappers))
    def collect(case):
        cases.append(case)

    collect()
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    found = run_script(RANK, 4, tmp_path / "cases", place.text("layouts"), limit_seconds=60 + count)
    assert found == [[{"cases": len(cases)}]] * 4
