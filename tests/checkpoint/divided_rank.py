"""One gloo rank of saves and loads of DTensors in generated layouts: `divided_rank.py CASES FOLDER`.

CASES is a pickled list of tuples: shape, type, layout that is saved, layout that is loaded. Each is saved by Trackbed
and by torch, and loaded by both, where torch can: it fills parts of several pieces wrongly.
"""

import json
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.support.checkpoints.divided import coordinates, part_of
from trackbed.checkpoint import load, open_checkpoint, save
from trackbed.checkpoint.state.divided_tensors import local_boxes

meshes = {}


def mesh_of(layout):
    """Mesh of the first ranks."""
    if layout.mesh_shape not in meshes:
        ranks = torch.arange(math.prod(layout.mesh_shape)).view(layout.mesh_shape)
        meshes[layout.mesh_shape] = DeviceMesh("cpu", ranks)
    return meshes[layout.mesh_shape]


def whole_of(shape, dtype):
    """A tensor of which each element differs from its neighbours."""
    numbers = torch.arange(math.prod(shape)).view(shape) % 113
    return (numbers * (1 + 2j) if dtype.is_complex else numbers).to(dtype)


def divided(whole, layout, *, is_empty):
    """This rank's part as a DTensor; zeros if it is to be filled."""
    mesh = mesh_of(layout)
    coordinate = mesh.get_coordinate()
    shape = tuple(whole.shape)
    if coordinate is None:
        local = whole.new_zeros((0,))
    else:
        places = part_of(np.arange(math.prod(shape)).reshape(shape), layout, coordinate)
        flat = whole.reshape(-1)
        flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # torch 2.9 cannot index 8-bit floats
        local = flat[torch.from_numpy(np.array(places)).reshape(-1)].view(whole.dtype).view(places.shape)
    local = torch.zeros_like(local) if is_empty else local.clone()
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, layout.placements, run_check=False, shape=torch.Size(shape), stride=strides)


def torch_can(layout, shape):
    """True if each rank has one box, which is all that torch can."""
    return all(
        len(local_boxes(shape, layout.mesh_shape, place, layout.placements)) == 1 for place in coordinates(layout)
    )


def check(found, expected):
    local, wanted = (tensor._local_tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected))
    assert torch.equal(local, wanted)


def run(case, folder):
    shape, dtype, before, after = case
    whole = whole_of(shape, dtype)
    saved, expected = divided(whole, before, is_empty=False), divided(whole, after, is_empty=False)
    save({"model": {"w": saved}, "step": 3}, folder / "ours")
    request = {"model": {"w": divided(whole, after, is_empty=True)}}
    loaded = load(request, folder / "ours")
    assert loaded["step"] == 3
    assert loaded["model"]["w"] is request["model"]["w"]
    check(loaded["model"]["w"], expected)
    if dist.get_rank() == 0 and whole.numel():
        stored = open_checkpoint(folder / "ours")["model.w"][...]
        assert torch.equal(stored.reshape(-1).view(torch.uint8), whole.reshape(-1).view(torch.uint8))
    num_ranks = max(math.prod(before.mesh_shape), math.prod(after.mesh_shape))
    if num_ranks < dist.get_world_size() or not whole.numel():
        return 0  # torch's functions are for the ranks of the mesh
    if torch_can(after, shape) and math.prod(after.mesh_shape) == dist.get_world_size():
        request = {"model": {"w": divided(whole, after, is_empty=True)}}
        dcp.load(request, checkpoint_id=folder / "ours")
        check(request["model"]["w"], expected)
    if torch_can(before, shape) and math.prod(before.mesh_shape) == dist.get_world_size():
        dcp.save({"model": {"w": saved}}, checkpoint_id=folder / "theirs")
        request = {"model": {"w": divided(whole, after, is_empty=True)}}
        load(request, folder / "theirs")
        check(request["model"]["w"], expected)
        return 1
    return 0


def main():
    cases, folder = pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])
    dist.init_process_group("gloo")
    with_torch = [run(case, folder / str(number)) for number, case in enumerate(cases)]
    print(json.dumps({"cases": len(cases), "with torch": sum(with_torch)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
