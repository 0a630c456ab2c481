"""`load_sharded_state` fills the tensors of a model where they lie, after all ranks have found that they fit."""

import copy
import sys
import zlib

import pytest
import torch
from torch import nn

import trackbed
from tests.optim.test_sharded_state import same, save, small, wrapped
from tests.support.processes.launching import run_script
from trackbed.checkpoint import open_checkpoint
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.optim import load_sharded_state, sharded_state

MIB = 1 << 20


def trained(group, module):
    wrapper, optimizer = wrapped(group, module)
    optimizer.zero_grad()
    wrapper(torch.ones(2, module[0].in_features)).sum().backward()
    optimizer.step()
    return wrapper, optimizer


def damage(folder, tensor):
    """Changes a byte of a tensor of float32 in the files of a checkpoint."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    for file in folder.glob("*.distcp"):
        place = file.read_bytes().find(content)
        if place >= 0:
            found = bytearray(file.read_bytes())
            found[place] ^= 1
            file.write_bytes(found)
            return
    raise AssertionError("the tensor is in no file")


@pytest.mark.parametrize("damaged", ["model", "optimizer"])
def test_damage_is_named_by_all_ranks_and_the_error_says_what_is_loaded(damaged, tmp_path):
    first = small(4, 4, 4)

    def run(group):
        wrapper, optimizer = trained(group, copy.deepcopy(first))
        save(group, tmp_path / "saved", wrapper, optimizer)
        group.barrier()
        if group.rank == 0:
            stored = open_checkpoint(tmp_path / "saved")
            key = {"model": "model.1.weight", "optimizer": "optimizer.state.exp_avg.1.weight"}[damaged]
            damage(tmp_path / "saved", stored[key][:])
        group.barrier()
        wrapper, optimizer = wrapped(group, small(4, 4, 4))
        before = copy.deepcopy([wrapper.state_dict(), optimizer.full_state_dict()])
        with pytest.raises(CheckpointError, match=r"load_sharded_state: rank [01]") as caught:
            load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=group)
        return str(caught.value), before, copy.deepcopy([wrapper.state_dict(), optimizer.full_state_dict()])

    for text, before, after in run_ranks(2, run):
        assert ("of this rank are loaded in part" in text) == (damaged == "model")
        assert damaged == "model" or all(map(same, before, after))


def test_a_model_that_was_loaded_in_part_takes_the_next_checkpoint(tmp_path):
    wrapper, optimizer = trained(SOLO, small(4, 4, 4))
    save(SOLO, tmp_path / "whole", wrapper, optimizer)
    save(SOLO, tmp_path / "damaged", wrapper, optimizer)
    wanted = copy.deepcopy([wrapper.state_dict(), optimizer.full_state_dict()])
    damage(tmp_path / "damaged", wrapper.module[1].weight)
    wrapper, optimizer = wrapped(SOLO, small(4, 4, 4))
    with pytest.raises(CheckpointError, match="load another checkpoint before they are used"):
        load_sharded_state(tmp_path / "damaged", wrapper, optimizer)
    load_sharded_state(tmp_path / "whole", wrapper, optimizer)
    assert all(map(same, wanted, [wrapper.state_dict(), optimizer.full_state_dict()]))


def tied(is_tied):
    module = small(4, 4, 4, 4)
    if is_tied:
        module[1].weight = module[0].weight
        module[2].weight = nn.Parameter(module[0].weight.detach()[:, :])  # another parameter in the same memory
    return module


def test_of_tensors_in_one_memory_the_last_is_kept_as_in_torch(tmp_path):
    apart = tied(is_tied=False)
    trackbed.save(sharded_state(apart, group=SOLO), tmp_path / "saved", group=SOLO)
    ours, torchs = tied(is_tied=True), tied(is_tied=True)
    load_sharded_state(tmp_path / "saved", ours, group=SOLO)
    torchs.load_state_dict(apart.state_dict())
    assert same(ours.state_dict(), torchs.state_dict())
    assert torch.equal(ours[0].weight, apart[2].weight)


class Turned(nn.Linear):
    """Layer that is saved with its matrix turned, and counts how often it was loaded."""

    num_loads = 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t()

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.num_loads += 1


def test_a_module_that_changes_its_state_is_asked(tmp_path):
    saved, loaded = nn.Sequential(Turned(3, 5)), nn.Sequential(Turned(3, 5))
    trackbed.save(sharded_state(saved, group=SOLO), tmp_path / "saved", group=SOLO)
    assert tuple(open_checkpoint(tmp_path / "saved")["model.0.weight"].shape) == (3, 5)
    load_sharded_state(tmp_path / "saved", loaded, group=SOLO)
    assert torch.equal(loaded[0].weight, saved[0].weight)
    assert loaded[0].num_loads == 1


def test_an_expanded_buffer_is_left_to_the_module(tmp_path):
    """torch refuses to write it, and so does Trackbed, with the same error."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.arange(3).expand(2, 3))

    trackbed.save(sharded_state(Positions(), group=SOLO), tmp_path / "saved", group=SOLO)
    with pytest.raises(CheckpointError, match="single memory location"):
        load_sharded_state(tmp_path / "saved", Positions(), group=SOLO)


SCRIPT = """
import json, sys, threading, zlib
from pathlib import Path
import torch
from torch import nn
from trackbed.comm import SOLO
from trackbed.optim import load_sharded_state

def anonymous_bytes():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024

torch.set_num_threads(1)
module = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(6)))
before, seen, has_ended = anonymous_bytes(), [0], threading.Event()

def watch():
    while not has_ended.wait(0.001):
        seen[0] = max(seen[0], anonymous_bytes())

thread = threading.Thread(target=watch)
thread.start()
load_sharded_state(sys.argv[1], module, group=SOLO)
has_ended.set()
thread.join()
sums = [zlib.crc32(one.weight.detach().numpy()) for one in module]
print(json.dumps({"more": seen[0] - before, "sums": sums}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_takes_no_second_copy_in_memory(tmp_path):
    module = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(6)))  # 192 MiB
    trackbed.save(sharded_state(module, group=SOLO), tmp_path / "saved", group=SOLO)
    (tmp_path / "load.py").write_text(SCRIPT)
    ((found,),) = run_script(tmp_path / "load.py", 1, tmp_path / "saved", limit_seconds=100)
    assert found["sums"] == [zlib.crc32(one.weight.detach().numpy()) for one in module]
    assert found["more"] < 64 * MIB
