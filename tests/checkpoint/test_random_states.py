"""Random generators of all ranks, saved and restored."""

import random

import numpy as np
import pytest
import torch

import trackbed
from tests.support.processes.launching import run_script
from trackbed import random_states, restore_random_states
from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError

SCRIPT = """
import json, random, sys
import numpy as np
import torch
import torch.distributed as dist
import trackbed

def drawn():
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]

dist.init_process_group("gloo")
folder, rank = sys.argv[1], dist.get_rank()
random.seed(rank)
np.random.seed(rank)
torch.manual_seed(rank)
if dist.get_world_size() == 2:
    drawn()
    trackbed.save({"random": trackbed.random_states(), "step": 1}, folder)
    expected = drawn()
    goes_on = trackbed.restore_random_states(trackbed.load(folder)["random"])
    print(json.dumps([goes_on, drawn() == expected]))
else:
    goes_on = trackbed.restore_random_states(trackbed.load(folder)["random"])
    first = drawn()
    trackbed.restore_random_states(trackbed.load(folder)["random"])
    print(json.dumps([goes_on, first == drawn(), first]))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.dist
def test_each_rank_goes_on_where_it_was_or_begins_a_stream_of_its_own(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    found = [lines[0] for lines in run_script(tmp_path / "program.py", 2, tmp_path / "saved", limit_seconds=60)]
    assert found == [[True, True]] * 2
    found = [lines[0] for lines in run_script(tmp_path / "program.py", 3, tmp_path / "saved", limit_seconds=60)]
    assert [lines[:2] for lines in found] == [[False, True]] * 3
    drawn = [number for lines in found for number in lines[2]]
    assert len(set(drawn)) == 9


def drawn():
    legacy = np.random
    return [random.random(), float(legacy.rand()), float(torch.rand(1)), float(legacy.normal())]


def test_one_process_goes_on_where_it_was(tmp_path):
    torch.manual_seed(3)
    trackbed.save({"random": random_states(group=SOLO)}, tmp_path / "saved", group=SOLO)
    expected = drawn()
    assert restore_random_states(trackbed.load(tmp_path / "saved", group=SOLO)["random"], group=SOLO)
    assert drawn() == expected


def test_another_number_of_ranks_is_warned_of(caplog):
    saved = random_states(group=SOLO)
    assert run_ranks(2, lambda group: restore_random_states(saved, group=group)) == [False, False]
    assert "saved by 1 ranks, and there are 2 now: each begins a stream of its own" in caplog.text


@pytest.mark.parametrize("value", [None, 3, {"ranks": 3}, {"seed": 1, "ranks": ["x"]}])
def test_another_value_is_refused(value):
    with pytest.raises(CheckpointError, match=r"random states: must be what random_states\(\) returned, found"):
        restore_random_states(value, group=SOLO)


def test_the_named_states_of_megatron_are_restored():
    tracker = pytest.importorskip("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.set_states({"model-parallel-rng": torch.arange(16, dtype=torch.uint8)})
    saved = random_states(group=SOLO)
    tracker.set_states({"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)})
    assert restore_random_states(saved, group=SOLO)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], torch.arange(16, dtype=torch.uint8))
    tracker.set_states(before)


def changed(state, **values):
    """What a rank has saved, with other values in it."""
    found = load_torch_item(state["ranks"][0], "test")
    return {**state, "ranks": [torch_bytes({**found, **values}, "test")]}


def hostile_values():
    state = load_torch_item(random_states(group=SOLO)["ranks"][0], "test")
    kind, keys, place, has_gauss, gauss = state["numpy"]
    version, numbers, more = state["python"]
    for wrong in (2**31 - 1, -(2**31), -5, 625, 1.5, None):
        yield {"numpy": [kind, keys, wrong, has_gauss, gauss]}
    yield {"numpy": [kind, keys[:9], place, has_gauss, gauss]}
    yield {"numpy": [kind, keys - 2**40, place, has_gauss, gauss]}
    yield {"numpy": [kind, keys.double() * float("nan"), place, has_gauss, gauss]}
    yield {"numpy": ["PCG64", keys, place, has_gauss, gauss]}
    yield {"python": (2, numbers, more)}
    yield {"python": (version, (*numbers[:-1], 9999), more)}
    yield {"python": (version, numbers[:5], more)}
    yield {"python": 3}
    yield {"torch": state["torch"][:100]}
    yield {"torch": "x"}
    yield {"devices": [3]}
    yield {"trackers": []}


def test_damaged_states_are_refused_before_any_generator_is_changed():
    good = random_states(group=SOLO)
    for values in hostile_values():
        damaged = changed(good, **values)
        restore_random_states(good, group=SOLO)
        with pytest.raises(CheckpointError, match="random states: must"):
            restore_random_states(damaged, group=SOLO)
        assert drawn() == drawn_after(good), values


def drawn_after(state):
    restore_random_states(state, group=SOLO)
    return drawn()


def test_a_state_that_is_damaged_on_one_rank_changes_the_generators_of_none():
    good = random_states(group=SOLO)
    both = {**good, "ranks": good["ranks"] * 2}
    damaged = {**good, "ranks": [good["ranks"][0], changed(good, torch=torch.zeros(3))["ranks"][0]]}
    expected = drawn_after(good)
    restore_random_states(good, group=SOLO)
    with pytest.raises(CheckpointError, match=r"rank 1: .*random states: must be states of generators"):
        run_ranks(2, lambda group: restore_random_states(both if group.rank == 0 else damaged, group=group))
    assert drawn() == expected


def test_a_value_for_other_ranks_on_one_rank_gives_all_streams_of_their_own():
    good = random_states(group=SOLO)
    both = {**good, "ranks": good["ranks"] * 2}
    values = [both, {**good, "ranks": good["ranks"] * 3}]
    assert run_ranks(2, lambda group: restore_random_states(values[group.rank], group=group)) == [False, False]
