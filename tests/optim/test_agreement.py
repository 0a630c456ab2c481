"""Ranks whose updates would differ are refused in the first step that they do."""

import numpy as np
import pytest
import torch

from tests.support.models.wrapped import backward, layers, wrap
from trackbed.comm import SOLO, run_ranks
from trackbed.comm.store import MemoryStore
from trackbed.comm.store_group import StoreGroup
from trackbed.errors import CollectiveError
from trackbed.optim import DataParallelOptimizer
from trackbed.optim.update_agreement import describe_options

GATHER = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 10,
}
WAYS = [{}, {"overlap_grad_reduce": True}, GATHER]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def step(wrapper, optimizer):
    optimizer.zero_grad()
    backward(wrapper, 0)
    return optimizer.step()


def other_rate(optimizer, model):
    optimizer.param_groups[0]["lr"] = 0.5


def other_betas(optimizer, model):
    optimizer.param_groups[0]["betas"] = (0.9, 0.95)


def freeze(optimizer, model):
    model[1].weight.requires_grad_(False)


SAME = "must be the same on every rank, but rank"
CHANGES = {
    other_rate: rf"the options of parameter groups {SAME} \d has lr=[\d.]+ in group 0, and rank \d lr=",
    other_betas: rf"the options of parameter groups {SAME} \d has betas=[^a-z]*in group 0, and rank \d betas=",
    freeze: rf"parameters that are frozen after wrapping {SAME} \d has (1\.weight|none), and rank \d (1\.weight|none)",
}


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_that_changes_its_update_is_refused_before_anything_is_updated(change, options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, allow_unused=True, **options)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), wrapper)
        step(wrapper, optimizer)
        wrapper.wait_for_params()
        before = [param.detach().clone() for param in model.parameters()]
        if group.rank == 1:
            change(optimizer, model)
        with pytest.raises(CollectiveError, match=CHANGES[change]):
            step(wrapper, optimizer)
        for param, own in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.detach(), own)

    run_ranks(2, work)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda rank: {"max_norm": 1.0 + rank}, "max_norm must be the same on every rank, but rank"),
        (lambda rank: {"loss_scale": 1.0 + rank}, "the loss scale must be the same on every rank, but rank"),
        (lambda rank: {"reverse": rank == 2}, "the parameter groups must be the same on every rank, but rank"),
    ],
)
def test_ranks_that_build_other_optimizers_are_refused(build, words, options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        arguments = build(group.rank)
        params = list(model.parameters())[:: -1 if arguments.pop("reverse", False) else 1]
        optimizer = DataParallelOptimizer(torch.optim.AdamW(params), wrapper, **arguments)
        with pytest.raises(CollectiveError, match=words):
            step(wrapper, optimizer)

    run_ranks(3, work)


@pytest.mark.parametrize("options", WAYS)
def test_a_schedule_that_all_ranks_follow_is_no_difference(options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        inner = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1) if group.rank else 0.10000000149011612)
        optimizer = DataParallelOptimizer(inner, wrapper)
        inner.param_groups[0]["note"] = object()  # of no consequence
        for _ in range(3):
            step(wrapper, optimizer)
            inner.param_groups[0]["lr"] = inner.param_groups[0]["lr"] * 0.5

    run_ranks(2, work)


@pytest.mark.parametrize("options", WAYS)
def test_numbers_of_other_types_are_no_difference(options):
    rates = (1, 1.0, np.float64(1), torch.tensor(1.0))

    def work(group):
        model = layers(4, 3, 2)
        optimizer = DataParallelOptimizer(
            torch.optim.SGD(model.parameters(), lr=rates[group.rank]), wrap(group, model, **options)
        )
        step(optimizer.model, optimizer)
        optimizer.param_groups[0]["lr"] = np.float32(0.5 if group.rank else 0.25)
        with pytest.raises(CollectiveError, match=r"rank \d has lr=0\.(5|25) in group 0, and rank \d lr=0\.(5|25) "):
            step(optimizer.model, optimizer)

    run_ranks(4, work)


@pytest.mark.parametrize("options", WAYS)
def test_experts_of_other_names_are_no_difference_but_other_options_of_the_same_experts_are(options):
    def work(group, is_shared):
        model = layers(4, 3, 2)
        for param in model[1].parameters():
            param.allreduce = False
        alone = {} if is_shared else {"expert_process_group": SOLO}
        wrapper = wrap(group, model, **options, **alone)
        named = [
            (f"{name} of rank {group.rank}" if name[0] == "1" else name, p) for name, p in model.named_parameters()
        ]
        groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.1 * (1 + group.rank)}]
        optimizer = DataParallelOptimizer(torch.optim.AdamW(groups), wrapper)
        if not is_shared:
            step(wrapper, optimizer)
            return
        with pytest.raises(CollectiveError, match="the options of parameter groups must be the same on every rank"):
            step(wrapper, optimizer)

    for is_shared in (False, True):
        run_ranks(2, lambda group, is_shared=is_shared: work(group, is_shared))


@pytest.mark.parametrize("options", WAYS)
def test_ranks_with_other_optimizers_or_states_are_refused(options):
    def work(group):
        kinds = torch.optim.Adam, torch.optim.AdamW
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        optimizer = DataParallelOptimizer(kinds[group.rank](model.parameters(), weight_decay=0.0), wrapper)
        with pytest.raises(
            CollectiveError,
            match=r"the class of the optimizer must be the same .* has torch.optim.adamw?.AdamW?, and rank",
        ):
            step(wrapper, optimizer)
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters()), wrapper)
        step(wrapper, optimizer)

    run_ranks(2, work)


@pytest.mark.parametrize("options", WAYS)
def test_ranks_that_load_other_states_are_refused_and_one_may_load_the_same_twice(options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters()), wrapper)
        step(wrapper, optimizer)
        state = optimizer.state_dict()
        step(wrapper, optimizer)
        later = optimizer.state_dict()
        for _ in range(1 + group.rank):
            optimizer.load_state_dict(state)
        step(wrapper, optimizer)
        optimizer.load_state_dict(later if group.rank else state)
        with pytest.raises(CollectiveError, match="the state that was loaded must be the same on every rank, but"):
            step(wrapper, optimizer)

    run_ranks(2, work)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_experts_of_some_of_the_ranks_are_compared_among_these(change, options):
    stores = [MemoryStore(), MemoryStore()]

    def work(group):
        experts = StoreGroup(lambda: stores[group.rank % 2], rank=group.rank // 2, size=2, timeout_seconds=30)
        model = layers(4, 3, 2)
        for param in model[1].parameters():
            param.allreduce = False
        wrapper = wrap(group, model, expert_process_group=experts, allow_unused=True, **options)
        groups = [{"params": list(model[number].parameters()), "lr": 0.1} for number in (1, 0)]
        optimizer = DataParallelOptimizer(torch.optim.AdamW(groups), wrapper)
        step(wrapper, optimizer)
        if group.rank % 2 == 1:  # both ranks of the second group
            optimizer.param_groups[0]["lr"] = 0.2
        step(wrapper, optimizer)
        if group.rank == 2:
            change(optimizer, model)
        if group.rank % 2 == 1:  # or the dense parameters would differ
            with pytest.raises(CollectiveError, match="same experts must update them alike, but rank 2 and rank 0 do"):
                step(wrapper, optimizer)
            return
        with pytest.raises(CollectiveError, match=CHANGES[change]) as raised:
            step(wrapper, optimizer)
        assert {"rank 0", "rank 2"} == {
            f"rank {number}" for number in range(4) if f"rank {number} " in str(raised.value)
        }

    run_ranks(4, work)


@pytest.mark.parametrize("options", WAYS)
def test_the_full_state_of_a_rank_with_experts_of_its_own_is_loaded_on_that_rank(options):
    def work(group, is_interrupted):
        model = layers(4, 3, 2)
        for param in model[1].parameters():
            param.allreduce = False
            param.data.add_(group.rank)
        wrapper = wrap(group, model, expert_process_group=SOLO, **options)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters()), wrapper)
        step(wrapper, optimizer)
        if is_interrupted:
            state = optimizer.full_state_dict()
            wrapper = wrap(group, model, expert_process_group=SOLO, **options)
            optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters()), wrapper)
            optimizer.load_full_state_dict(state)
        step(wrapper, optimizer)
        wrapper.wait_for_params()
        return [param.detach().clone() for param in model.parameters()]

    kept, loaded = (run_ranks(2, lambda group, is_in=is_in: work(group, is_in)) for is_in in (False, True))
    for one, other in zip(kept, loaded, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_state_that_one_rank_has_alone_is_not_filled_up_with_anything():
    def work(group):
        model = layers(4, 300, 2)
        wrapper = wrap(group, model, **{**GATHER, "bucket_size": None})
        optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters()), wrapper)
        step(wrapper, optimizer)
        state = optimizer.full_state_dict()
        model = layers(4, 300, 2)
        fresh = DataParallelOptimizer(
            torch.optim.AdamW(model.parameters()), wrap(group, model, **{**GATHER, "bucket_size": None})
        )
        if group.rank == 0:
            fresh.load_full_state_dict(state)
        with pytest.raises(CollectiveError, match=r"of .* is there for [\d,]+ of [\d,]+ elements: load the same state"):
            fresh.full_state_dict()

    run_ranks(2, work)


def test_options_are_described_as_numbers_and_words():
    options = {"params": [1], "lr": torch.tensor(0.5), "betas": (0.5, torch.tensor(0.25)), "foreach": None, "x": {}}
    assert describe_options(options) == ["lr=0.5", "betas=(0.5, 0.25)", "foreach=None"]
