"""Each row of the table of checkpoints in "Move from PyTorch" is so."""

import collections
import datetime as dt
import enum
import re
import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import trackbed
from trackbed import DistributedDataParallel, DistributedDataParallelConfig, ShardedTensor
from trackbed.errors import CheckpointError

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "move-from-pytorch.md"


class Color(enum.Enum):
    RED = 1


class Options(dict):
    pass


class Noted(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.weight, self.note = nn.Parameter(torch.ones(1)), note

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def rows():
    """Case and result of each row."""
    section = PAGE.read_text().partition("\n## Checkpoints\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (works|refused|differs) \| (.*?) ?\|$", section, flags=re.MULTILINE)
    return [(case, result) for case, result, _ in found]


def again(value, folder):
    trackbed.save({"x": [value]}, folder)
    return trackbed.load(folder)["x"][0]


def containers(folder):
    for number, value in enumerate(
        [
            collections.defaultdict(int, a=1), collections.Counter("ab"), collections.OrderedDict(b=1, a=2),
            collections.deque([1], 3), {1, 2}, frozenset([1]), (1, 2),
        ]
    ):  # fmt: skip
        found = again(value, folder / f"{number}")
        assert (type(found), found) == (type(value), value)


def refused(value, folder, words):
    with pytest.raises(CheckpointError, match=words):
        trackbed.save({"a": {"b": value}}, folder / "step")
    assert not folder.exists() or list(folder.iterdir()) == []


def subclasses(folder):
    refused(collections.defaultdict(lambda: 1), folder, r"a\.b must be .*save dict\(value\)")
    refused(Options(a=1), folder, r"a\.b must be .*save dict\(value\)")


def numpy_scalars(folder):
    module = nn.Linear(2, 2)
    adamw = torch.optim.AdamW(module.parameters())
    optimizer = trackbed.DataParallelOptimizer(adamw, DistributedDataParallel(module))
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5 * (1 + np.cos(step)))
    trackbed.save(trackbed.sharded_state(optimizer.model, optimizer), folder / "step")
    assert type(trackbed.load(folder / "step")["optimizer"]["param_groups"][0]["lr"]) is np.float64


def empty_values(folder):
    for number, value in enumerate([b"", dt.datetime(2024, 1, 1, fold=1), np.zeros((0, 2))]):
        assert str(again(value, folder / f"{number}")) == str(value)
    assert again(BytesIO(), folder / "stream").getvalue() == b""


def enums(folder):
    refused(Color.RED, folder, r"a\.b must be .*add_safe_globals")
    with torch.serialization.safe_globals([Color]):
        assert again(Color.RED, folder / "step") is Color.RED


def other_values(folder):
    for value in (ValueError("x"), np.array([None]), 2**2100):
        refused(value, folder, r"a\.b must be .*save ")


def no_dictionary(folder):
    for state in ([1], torch.ones(2)):
        with pytest.raises(CheckpointError, match="state: must be a dictionary"):
            trackbed.save(state, folder)


def keys(folder):
    with pytest.raises(CheckpointError, match="must be text, found 5"):
        trackbed.save({"w": ShardedTensor.from_rank_offsets(5, torch.ones(2))}, folder)
    assert again({5: 1}, folder) == {5: 1}


def extra_state(folder):
    for number, note in enumerate([torch.ones(3), {"a": 1}, None]):
        new = Noted(torch.empty(0))
        trackbed.save(trackbed.sharded_state(Noted(note)), folder / f"{number}")
        trackbed.load_sharded_state(folder / f"{number}", new)
        assert str(new.note) == str(note)


def empty_buffers(folder):
    old, new = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    new.running_mean = torch.empty(0)
    trackbed.save(trackbed.sharded_state(old), folder)
    with pytest.raises(CheckpointError, match="size mismatch for running_mean"):
        trackbed.load_sharded_state(folder, new)


def other_shapes(folder):
    trackbed.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, folder)
    for shape in ((0,), (4,), (3, 1)):
        with pytest.raises(CheckpointError, match="w: must have the shape"):
            trackbed.load({"w": ShardedTensor.from_rank_offsets("w", torch.ones(shape))}, folder)


@pytest.mark.filterwarnings("ignore")
def no_elements(folder):
    module = nn.Linear(4, 0)
    trackbed.save(trackbed.sharded_state(module), folder)
    dcp.load({"model": module.state_dict()}, checkpoint_id=str(folder), no_dist=True)
    trackbed.load_sharded_state(folder, module)


def two_models(folder):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {"one": trackbed.sharded_state(one), "other": trackbed.sharded_state(other)}
    with pytest.raises(CheckpointError, match=r"one\.model\.\w+ and other\.model\.\w+"):
        trackbed.save(state, folder)
    state = {**trackbed.sharded_state(one, prefix="one."), **trackbed.sharded_state(other, prefix="other.")}
    trackbed.save(state, folder)
    trackbed.load_sharded_state(folder, other, prefix="one.")
    assert torch.equal(one.weight, other.weight)


def outer_modules(folder):
    trainer = nn.ModuleDict({"net": DistributedDataParallel(nn.Linear(2, 2))})
    trainer.load_state_dict(trainer.state_dict())
    trackbed.save(trackbed.sharded_state(trainer), folder)
    trackbed.load_sharded_state(folder, trainer)


def slices(folder):
    big = torch.zeros(100_000)
    trackbed.save({"a": big[:4], "b": big[2:6]}, folder)
    assert (folder / "common.pt").stat().st_size < 5_000
    loaded = trackbed.load(folder)
    loaded["a"].fill_(1)
    assert loaded["b"].tolist() == [1, 1, 0, 0]


def torch_save(folder):
    module = nn.Linear(300, 300)
    DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=True))
    stream = BytesIO()
    torch.save(module.bias.detach(), stream)
    assert len(stream.getvalue()) > 300_000
    from safetensors.torch import save_model

    folder.mkdir()
    with pytest.raises(RuntimeError, match="covering the entire storage"):
        save_model(module, str(folder / "model.safetensors"))
    stream = BytesIO()
    torch.save({name: value.clone() for name, value in module.state_dict().items()}, stream)
    assert len(stream.getvalue()) < 400_000


def outside(folder):
    with pytest.raises(trackbed.errors.ArgumentError, match="group: must be a process group"):
        trackbed.save({"a": 1}, folder, group=-100)  # with torch.distributed: tests/checkpoint/test_outside_ranks.py


def torch_over_ours(folder):
    trackbed.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, folder)
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=str(folder), no_dist=True)
    with pytest.raises(CheckpointError, match="another program has saved here") as caught:
        trackbed.open_checkpoint(folder)
    for name in re.search(r"remove (.*) \(", str(caught.value))[1].split(", "):
        (folder / name).unlink()
    assert trackbed.open_checkpoint(folder)["w"][...].tolist() == [0, 0]


def safetensors(folder):
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    writer = dcp.FileSystemWriter(str(folder), serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": torch.zeros(2)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointError, match="format of safetensors"):
        trackbed.open_checkpoint(folder)["w"][...]


def converted(folder):
    trackbed.save(trackbed.sharded_state(nn.Sequential(nn.Linear(2, 2))), folder)
    dcp_to_torch_save(str(folder), str(folder.with_suffix(".pt")))
    assert set(torch.load(folder.with_suffix(".pt"))) == {"model.0.weight", "model.0.bias"}


CHECKS = [
    containers, subclasses, numpy_scalars, empty_values, enums, other_values, no_dictionary, keys, extra_state,
    empty_buffers, other_shapes, no_elements, two_models, outer_modules, slices, torch_save, outside, torch_over_ours,
    safetensors, converted,
]  # fmt: skip


def test_each_row_has_a_check():
    assert len(rows()) == len(CHECKS)


@pytest.mark.parametrize("number", range(len(CHECKS)))
def test_the_row_is_so(number, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CHECKS[number](tmp_path / "step-1")
