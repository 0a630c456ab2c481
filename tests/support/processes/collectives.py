"""Four processes that run the contract of collectives in groups of 1 to 4 ranks. Run by itself, one of them."""

import datetime as dt
import json
import sys
import traceback

import pytest
import torch
import torch.distributed as dist

from tests.support.contracts.collectives import CASES, SHARED_MEMORY_CASES, Rank
from tests.support.processes.launching import run_script
from trackbed.comm.torch import TorchGroup
from trackbed.errors import ArgumentError
from trackbed.grads import reduce_scatter_with_fp32_accumulation
from trackbed.grads.collectives import TorchCollectives

SIZE = 4
LIMIT_SECONDS = 240
TIMEOUT = dt.timedelta(seconds=40)


def the_function_of_megatron_adds_in_the_stated_order(rank):
    group = dist.distributed_c10d._resolve_process_group(rank.group_name)
    for dtype in (torch.bfloat16, torch.float32):
        for async_op in (False, True):
            sent = rank.numbers(1, 12, dtype)
            output = torch.full((12 // rank.size,), 7.0, dtype=dtype)
            work = reduce_scatter_with_fp32_accumulation(output, sent, dist.ReduceOp.SUM, group, async_op)
            assert (work is not None) == async_op
            if work is not None:
                assert work.wait() is True
                assert work.is_completed()
            wanted = rank.sum(1, 12, dtype, 1.0, False).chunk(rank.size)[rank.number]
            assert torch.equal(output, wanted)
            assert torch.equal(sent, rank.numbers(1, 12, dtype))


def the_function_of_megatron_refuses_what_it_cannot_sum(rank):
    group = dist.distributed_c10d._resolve_process_group(rank.group_name)
    for op, count, words in (
        (dist.ReduceOp.AVG, rank.size, "op must be ReduceOp.SUM"),
        (dist.ReduceOp.SUM, 4 * rank.size + 1, f"input_tensor must have a multiple of {rank.size} elements"),
    ):
        if count % rank.size == 0 and op == dist.ReduceOp.SUM:
            continue
        with pytest.raises(ArgumentError, match=words):
            reduce_scatter_with_fp32_accumulation(torch.zeros(1), torch.zeros(count), op, group, False)


TORCH_CASES = {
    case.__name__: case
    for case in (
        the_function_of_megatron_adds_in_the_stated_order,
        the_function_of_megatron_refuses_what_it_cannot_sum,
    )
}


def ways(kind):
    """Name, cases, and function that makes a rank, of each way to communicate."""
    if kind == "shared_memory":
        yield "shared memory", SHARED_MEMORY_CASES, lambda group, messages: Rank.sharing(messages)
        return
    for name, fp32, promised in (("gloo", False, ()), ("gloo, fp32 accumulation", True, ("reduce_scatter",))):

        def new_rank(group, messages, fp32=fp32, promised=frozenset(promised)):
            rank = Rank(TorchCollectives(group, fp32_accumulation=fp32), messages, promised=promised)
            rank.group_name = group.group_name
            return rank

        yield name, CASES | TORCH_CASES, new_rank


def cases(kind):
    """Names of all that the processes check."""
    return [
        f"{way}, {size} ranks: {case}" for way, found, _ in ways(kind) for size in range(1, SIZE + 1) for case in found
    ]


def outcomes(kind):
    """Starts the processes. Returns, for each name, the errors by rank."""
    found = {name: {} for name in cases(kind)}
    for rank, (errors,) in enumerate(run_script(__file__, SIZE, kind, limit_seconds=LIMIT_SECONDS)):
        for name, error in errors.items():
            found[name][rank] = error
    return found


def main(kind):
    """Runs all cases on one rank, and prints the errors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    groups = {size: dist.new_group(range(size), timeout=TIMEOUT) for size in range(1, SIZE + 1)}
    errors = {}
    for size, group in groups.items():
        if dist.get_rank() >= size:
            continue
        messages = TorchGroup(group, timeout_seconds=TIMEOUT.total_seconds())
        for way, found, new_rank in ways(kind):
            for name, case in found.items():
                try:
                    case(new_rank(group, messages))
                except BaseException:
                    errors[f"{way}, {size} ranks: {name}"] = traceback.format_exc()
    print(json.dumps(errors))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
