"""Loads through a wrapper under Megatron Core's names on one of two gloo ranks: `exchange_rank.py WAY FOLDER`.

WAY is what is passed to `install`, or "not" for a call without it. Prints the numbers of exchanges of each kind.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import trackbed.megatron
from trackbed.checkpoint.plan import exchange
from trackbed.megatron.checkpoints import fully_parallel


def count(counts, module, name):
    """Counts the calls of a function."""
    function = getattr(module, name)

    def counted(*arguments, **options):
        counts[name] += 1
        return function(*arguments, **options)

    setattr(module, name, counted)


def main(way, folder):
    trackbed.megatron.install(**({} if way == "not" else {"exchange": way}))
    from trackbed.megatron.core import dist_checkpointing as dc
    from trackbed.megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy

    counts = Counter()
    count(counts, exchange, "_all_to_all")
    count(counts, fully_parallel, "exchange_by_distribution")
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def state(value):
        return {
            str(number): dc.ShardedTensor.from_rank_offsets(
                str(number), torch.full((5,), value + number), replica_id=rank
            )
            for number in range(4)
        }

    if rank == 0:
        folder.mkdir()
    dist.barrier()
    dc.save(state(1.0), folder)
    strategy = fully_parallel.FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(folder))
    loaded = dc.load(state(0.0), folder, strategy)
    assert {key: value.tolist() for key, value in loaded.items()} == {str(i): [1.0 + i] * 5 for i in range(4)}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps([counts["exchange_by_distribution"], counts["_all_to_all"] > 0]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
