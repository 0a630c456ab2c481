"""Distribution of shards, against Megatron Core's."""

import random

import pytest
import torch

from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.megatron.checkpoints.shard_exchange import distribute_shards_to_ranks, shard_size


def megatrons(shard_to_ranks, shard_to_size, num_ranks, cross):
    """The same as 0.16.1's function, which needs no GPU."""
    exchange_utils = pytest.importorskip("megatron.core.dist_checkpointing.exchange_utils")
    return exchange_utils.distribute_shards_to_ranks(shard_to_ranks, shard_to_size, num_ranks, cross)


def random_case(rng):
    num_ranks = rng.choice([1, 2, 3, 8, 17])
    shards = [(f"k{rng.randint(0, 9)}.{number}", (number % 3,), None) for number in range(rng.randint(0, 40))]
    rng.shuffle(shards)
    groups = [rng.sample(range(num_ranks), rng.randint(1, num_ranks)) for _ in range(4)]
    ranks = {
        shard: rng.choice(groups)
        if rng.random() < 0.7
        else [rng.randrange(num_ranks) for _ in range(rng.randint(1, 4))]
        for shard in shards
    }
    sizes = {shard: rng.choice([0, 4, 8, 8, 100, rng.randint(0, 1 << 40)]) for shard in shards}
    return ranks, sizes, num_ranks, {shard for shard in shards if rng.random() < 0.2}


def test_each_shard_goes_where_megatron_core_sends_it_in_the_same_order():
    rng = random.Random(1)
    for _ in range(1_000):
        case = random_case(rng)
        found, wanted = distribute_shards_to_ranks(*case), megatrons(*case)
        assert list(found.items()) == list(wanted.items())


def test_the_worked_example_of_four_ranks():
    ranks = {f"w{number}": list(range(4)) for number in range(6)} | {f"own{rank}": [rank] for rank in range(4)}
    sizes = {f"w{number}": size for number, size in enumerate((4_000, 8_000, 12_000, 16_000, 20_000, 24_000))}
    found = distribute_shards_to_ranks(ranks, sizes | {f"own{rank}": 12 for rank in range(4)}, 4)
    assert {name: found[name] for name in sizes} == {"w5": 0, "w4": 1, "w3": 2, "w2": 3, "w1": 3, "w0": 2}


def test_ten_thousand_shards_are_distributed_over_512_ranks_at_once():
    import time

    rng = random.Random(2)
    shards = [(f"k{number}", (0,), None) for number in range(10_000)]
    everyone = list(range(512))
    sizes = {shard: rng.randint(1, 1 << 24) for shard in shards}
    times = []
    for _ in range(3):  # the least, as other processes share the caches
        start = time.process_time()
        found = distribute_shards_to_ranks(dict.fromkeys(shards, everyone), sizes, 512, set())
        times.append(time.process_time() - start)
    assert min(times) < 0.25
    loads = [0] * 512
    for shard, rank in found.items():
        loads[rank] += sizes[shard]
    assert max(loads) / (sum(loads) / 512) < 1.02


def test_a_shard_counts_with_the_bytes_of_its_box():
    entry = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 5, dtype=torch.bfloat16), (0, 1, 4))
    assert shard_size(entry) == 30
