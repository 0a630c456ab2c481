"""A rank that does not belong to the group is told so, as by the wrapper."""

from pathlib import Path

import pytest
import torch

from tests.support.processes.launching import run_script
from trackbed.checkpoint import latest_checkpoint, load
from trackbed.checkpoint.save import save
from trackbed.errors import ArgumentError
from trackbed.optim import load_sharded_state, sharded_state

RANK = Path(__file__).parent / "outside_rank.py"
OUTSIDE = "process_group: this process must belong to it, but rank 1 does not"


def test_a_rank_outside_the_group_is_told_so_by_each_function(tmp_path):
    inside, outside = run_script(RANK, 2, tmp_path, limit_seconds=60)
    names = ["save", "load", "latest_checkpoint", "sharded_state", "load_sharded_state"]
    assert inside == [dict.fromkeys(names, "")]
    assert outside == [dict.fromkeys(names, OUTSIDE)]


@pytest.fixture
def rank_1():
    """This process as rank 1 of two, without the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield torch.distributed.new_group([0])
    torch.distributed.destroy_process_group()


def test_what_torch_gives_to_ranks_outside_is_refused(rank_1, tmp_path):
    module = torch.nn.Linear(2, 2)
    for call in (
        lambda: save({"a": 1}, tmp_path / "step", group=rank_1),
        lambda: load(tmp_path / "step", group=rank_1),
        lambda: load({}, tmp_path / "step", group=rank_1),
        lambda: latest_checkpoint(tmp_path, group=rank_1),
        lambda: sharded_state(module, group=rank_1),
        lambda: load_sharded_state(tmp_path / "step", module, group=rank_1),
    ):
        with pytest.raises(ArgumentError, match=OUTSIDE):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", ["world", [0, 1], 0, -100, object()])
def test_what_is_no_group_is_refused_by_its_class(group, tmp_path):
    with pytest.raises(ArgumentError, match=f"group: must be a process group of torch.*{type(group).__name__}"):
        save({"a": 1}, tmp_path / "step", group=group)
