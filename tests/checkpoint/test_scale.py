"""Plans and descriptions of a large training: CPU seconds of 200,000 shards on 4,096 ranks."""

import time

import numpy as np
import torch

from trackbed.checkpoint.format.extents import SUM_BYTES, FileChecksum, SideFile
from trackbed.checkpoint.io.written_files import WrittenFiles, catalogue_of
from trackbed.checkpoint.plan.assignment import assign_balanced
from trackbed.checkpoint.plan.shard_table import DTYPES, Table
from trackbed.checkpoint.plan.validate import require_valid

NUM_RANKS = 4096
NUM_SHARDS = 200_000
COPIES = 4
SHARDS_PER_TENSOR = 100


def table_of_all():
    """Table of 2,000 tensors, each cut into 100 shards of 1 to 4 MiB, each of which 4 neighbouring ranks have."""
    num_groups = NUM_RANKS // COPIES
    shard = np.repeat(np.arange(NUM_SHARDS), COPIES)
    copy = np.tile(np.arange(COPIES), NUM_SHARDS)
    rank = shard % num_groups * COPIES + copy
    order = np.argsort(rank, kind="stable")
    shard, copy, rank = shard[order], copy[order], rank[order]
    key, place = np.divmod(shard, SHARDS_PER_TENSOR)
    size = 256 + 128 * (key % 7)
    ones, zeros = np.ones(len(key), dtype=np.int64), np.zeros(len(key), dtype=np.int64)
    return Table(
        keys=tuple(f"layer.{number}.weight" for number in range(NUM_SHARDS // SHARDS_PER_TENSOR)),
        key=key,
        dtype=np.full(len(key), DTYPES.index(torch.float32)),
        num_axes=2 * ones,
        num_bytes=size * 4096,
        is_main=(copy == 0).astype(np.int64),
        is_regular=ones,
        may_differ=zeros,
        rank=rank,
        global_shape=np.stack([size * SHARDS_PER_TENSOR, 1024 * ones], axis=1),
        offset=np.stack([size * place, zeros], axis=1),
        shape=np.stack([size, 1024 * ones], axis=1),
    )


def written_of(table, own):
    """What a rank says that it has written."""
    sizes = table.num_bytes[own.row]
    starts = np.cumsum(sizes + 4096) - sizes
    counts = -(-sizes // SUM_BYTES)
    items = np.stack([np.zeros_like(sizes), starts - 64, sizes + 128, starts, sizes, counts], axis=1)
    file = FileChecksum(int((sizes + 4096).sum()) + 4096, 0)
    return WrittenFiles({f"__{own.rank[0]}_0.distcp": file}, items, np.zeros(counts.sum(), dtype=np.uint32))


def seconds(function, *arguments):
    """Result and CPU time, the least of three."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        found = function(*arguments)
        best = min(best, time.process_time() - start)
    return found, best


def test_a_save_of_4096_ranks_is_checked_planned_and_described_in_fractions_of_a_second():
    table = table_of_all()
    _, validation = seconds(require_valid, table)
    plan, planning = seconds(assign_balanced, table, NUM_RANKS)
    loads = np.bincount(plan.rank, table.num_bytes[plan.row], minlength=NUM_RANKS)
    assert loads.max() / loads.mean() < 1.05
    assert (plan.axis < 0).all()  # none of them is large enough to be cut
    side = SideFile(
        "1", {}, catalogue_of(table, plan, [written_of(table, plan.of_rank(rank)) for rank in range(NUM_RANKS)])
    ).encode()
    opened, reading = seconds(SideFile.decode, side)
    assert len(opened.catalogue) == NUM_SHARDS
    print(f"validation {validation:.2f} s, plan {planning:.2f} s, side file {reading:.3f} s")
    assert (validation < 3, planning < 0.5, reading < 0.1) == (True, True, True)
