"""Training gives the same bits however gradients are cut, sharded and communicated."""

import itertools

import pytest
import torch

from tests.support.models.data_parallel import TYPES, WAYS, Case, reference, torch_losses, train
from tests.support.tiers import slow_but
from trackbed.comm import run_ranks


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("kind", "size", "num_micro"),
    slow_but(
        [("fp32", 1, 2), ("bf16 with fp32 gradients", 2, 2), ("bf16", 3, 2), ("fp32", 4, 1)],
        itertools.product(TYPES, [1, 2, 3, 4], [1, 2]),
    ),
)
def test_training_equals_a_process_that_adds_in_the_stated_order(kind, size, num_micro):
    dtype, options = TYPES[kind]
    case = Case(dtype, num_micro, options=options)
    losses, wanted = reference(size, case)
    digest = wanted.digest()
    for name, way in WAYS.items():
        ranks = run_ranks(size, lambda group, way=way: train(group, Case(dtype, num_micro, options={**options, **way})))
        for rank, outcome in enumerate(ranks):
            assert outcome.digest() == digest, f"rank {rank} of {size}: {name}"
            assert outcome.losses == losses[rank]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(losses, torch_losses(size, case), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize(("one", "other"), [((4, 1), (2, 2)), ((2, 1), (1, 2))])
def test_ranks_and_micro_batches_can_be_traded(one, other):
    def digest(size, num_micro):
        case = Case(num_micro=num_micro, options={"use_distributed_optimizer": True})
        return run_ranks(size, lambda group: train(group, case))[0].digest()

    assert digest(*one) == digest(*other)
