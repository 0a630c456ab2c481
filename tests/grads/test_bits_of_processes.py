"""The bits of real processes over gloo are those of one process that adds in the stated order."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.support.models.data_parallel import TYPES, WAYS, Case, reference
from tests.support.processes.launching import run_script

SCRIPT = Path(__file__).with_name("bits_rank.py")
COLLECTIVES = {
    "shared memory": {"collectives": "shared_memory"},
    "fp32 accumulation": {"collectives": "torch", "reduce_scatter_with_fp32_accumulation": True},
}


def run(size, ways):
    """Digest of each way on each rank."""
    return list(zip(*run_script(SCRIPT, size, json.dumps(ways), limit_seconds=300), strict=True))


def check(size, kinds, counts):
    torch.set_num_threads(1)
    ways, names = [], []
    for kind, num_micro, (way, options), (how, more) in itertools.product(
        kinds, counts, WAYS.items(), COLLECTIVES.items()
    ):
        if how == "fp32 accumulation" and not options["use_distributed_optimizer"] and size > 2:
            continue  # gloo adds in an order of its own
        dtype, of_type = TYPES[kind]
        ways.append([str(dtype).removeprefix("torch."), num_micro, {**of_type, **options, **more}])
        names.append((kind, num_micro, way, how))
    wanted = {}
    for kind, num_micro in itertools.product(kinds, counts):
        dtype, options = TYPES[kind]
        losses, outcome = reference(size, Case(dtype, num_micro, options=options))
        wanted[kind, num_micro] = (outcome.digest(), losses)
    for name, ranks in zip(names, run(size, ways), strict=True):
        digest, losses = wanted[name[:2]]
        assert [found for found, _ in ranks] == [digest] * size, name
        assert [found for _, found in ranks] == losses, name


@pytest.mark.slow
def test_three_processes_give_the_bits_of_one():
    check(3, ["bf16"], [2])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_processes_give_the_bits_of_one(size):
    check(size, list(TYPES), [1, 2])
