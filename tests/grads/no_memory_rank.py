"""Trains on ranks of which the last has no memory to share. Prints the collectives, and whether losses are right."""

import json

import torch
import torch.distributed as dist

from tests.support.models.data_parallel import Case, reference, run_steps, wrap
from trackbed.comm.shared_memory import SharedMemory


def refuse(num_bytes):
    """Stands for a system that refuses memory."""
    raise OSError(38, "Function not implemented")


def main():
    """Runs one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == size - 1:
        SharedMemory.create = refuse
    case = Case(steps=2, options={"use_distributed_optimizer": True})
    wrapper, optimizer = wrap(None, case)
    losses, _ = run_steps(wrapper, optimizer, case)
    wanted = reference(size, case)[0][rank]
    print(json.dumps([type(wrapper.engine.dense_collectives).__name__, losses == wanted]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
