"""Saves a small checkpoint with a source tree of Megatron Core, on each of two ranks. Prints the version.

    save_checkpoint.py FOLDER

The tree comes first in PYTHONPATH, this folder second; see `tests/checkpoint/golden/PROVENANCE.md`.
"""

import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import cuda_shim  # noqa: F401  Megatron Core names CUDA everywhere
import torch
import torch.distributed as dist


class Unused(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


# The models import kernels that need triton, which no checkpoint uses.
TRITON_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"
sys.modules[TRITON_KERNELS] = Unused(TRITON_KERNELS)


def state_of(dc, rank, size):
    """State dictionary of a rank."""
    box = dc.ShardedTensor.from_rank_offsets
    return {
        "rows": box("rows", torch.arange(6.0).view(2, 3) + 10 * rank, (0, rank, size)),
        "columns": box("columns", torch.arange(8, dtype=torch.int64).view(4, 2) + 100 * rank, (1, rank, size)),
        "copies": box("copies", torch.full((5,), 0.5).bfloat16(), replica_id=rank),
        "layers": [box("layers", torch.arange(5.0) + rank, (0, rank, size), prepend_axis_num=1)],
        "object": dc.ShardedObject("object", {"rank": rank}, (size,), (rank,)),
        "step": 7,
        "options": {"name": "golden", "rates": [0.5, 0.25]},
    }


def main(folder):
    """Runs one rank."""
    import megatron.core
    from megatron.core import dist_checkpointing as dc

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    dc.save(state_of(dc, dist.get_rank(), dist.get_world_size()), folder, content_metadata={"version": 3})
    dist.barrier()
    dist.destroy_process_group()
    print(megatron.core.__version__)


if __name__ == "__main__":  # Megatron Core starts processes that import this file
    main(sys.argv[1])
