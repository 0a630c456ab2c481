"""One gloo rank of a resume that counts what it reads: `read_bytes_rank.py FOLDER`. The first launch saves.

A matrix of 96 MiB and its optimizer, cut along the first axis. Prints bytes that were read, and that the rank has.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trackbed
from trackbed.checkpoint.io import file_reader

read = [0]


def preadv(descriptor, buffers, offset, counted=os.preadv):
    count = counted(descriptor, buffers, offset)
    read[0] += count
    return count


def new(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4096, 6144, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    model, optimizer = new(1)
    if not folder.exists():
        dist.barrier()
        model(torch.ones(2, 4096)).sum().backward()
        optimizer.step()
        trackbed.save(trackbed.sharded_state(model, optimizer), folder)
    model, optimizer = new(2)
    file_reader.os.preadv = preadv
    trackbed.load_sharded_state(folder, model, optimizer)
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    own = sum(getattr(one, "_local_tensor", one).nbytes for one in tensors)
    print(json.dumps([read[0], own]), flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
