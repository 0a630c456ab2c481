"""One gloo rank of saves and loads in generated layouts: `layout_rank.py CASES PLACE`.

PLACE is a folder, or an address. CASES is a pickled list of tuples: world, sharding that is saved, sharding that is
loaded, exchange, and the name of an exchange of Megatron Core's wrappers, or None to use Trackbed's own functions.
"""

import json
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

from tests.support.checkpoints.states import check_loaded, state_of
from trackbed.checkpoint import load, save
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from trackbed.megatron.checkpoints.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy


def run(case, folder, groups):
    world, before, after, exchange, wrapped = case
    rank = dist.get_rank()
    if wrapped is not None:  # strategies are for all ranks
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
        serialization.save(state_of(world, before, rank), folder, strategy)
        request = state_of(world, after, rank, is_empty=True)
        loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), exchange_algo=wrapped)
        loaded = serialization.load(request, folder, loader)
        check_loaded(world, after, rank, request, loaded, in_place=False)
        return
    if rank < before.num_ranks:
        save(state_of(world, before, rank), folder, group=groups[before.num_ranks])
    dist.barrier()
    if rank < after.num_ranks:
        request = state_of(world, after, rank, is_empty=True)
        check_loaded(
            world, after, rank, request, load(request, folder, group=groups[after.num_ranks], exchange=exchange)
        )


def main():
    cases, place = pickle.loads(Path(sys.argv[1]).read_bytes()), sys.argv[2]
    dist.init_process_group("gloo")
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 4)}
    for number, case in enumerate(cases):
        run(case, f"{place}/{number}", groups)
    print(json.dumps({"cases": len(cases)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
