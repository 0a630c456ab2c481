"""Trainings of drawn models have the values that torch's optimizers have alone, also after a change of the layout."""

import contextlib
import itertools

import pytest
import torch

import trackbed
from tests.support.models.generated import CONFIGS, KINDS, LOW, Case, Reference
from trackbed.comm import run_ranks
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks are threads, which would all start threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_close(case, config, name, found, expected):
    if case.is_rounded(config):
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(found.dtype, 1e-6)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert torch.equal(found, expected), (case, name, (found - expected).abs().max())


def assert_same_states(case, config, found, expected, mains):
    """Asserts that the states are those of torch, and of the same types. Without elements, there may be none."""
    found, expected = (
        {name: dict(own) for name, own in states.items() if mains[name].numel()} for states in (found, expected)
    )
    assert set(found) >= set(expected)
    for name, own in found.items():
        main = own.pop("main_param", None)
        if main is not None:
            assert_close(case, config, name, main, mains[name])
        assert set(own) == set(expected.get(name, {})), (case, name)
        for key, value in own.items():
            other = expected[name][key]
            assert type(value) is type(other)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype, (case, name, key)
                assert_close(case, config, (name, key), value, other)
            else:
                assert value == other


def watch(module):
    """Records the gradients that hooks see, by name."""
    seen = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            param.register_hook(lambda gradient, name=name: seen.setdefault(name, []).append(gradient.clone()))
    return seen


def wrap(case, group, module, config):
    options = CONFIGS[config] | {"grad_reduce_in_fp32": case.reduces_in_fp32}
    model = DistributedDataParallel(
        module, DistributedDataParallelConfig(**options), process_group=group, allow_unused=True
    )
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    found = case.optimizers([param for _, param in named], [name for name, _ in named])
    return model, DataParallelOptimizer(found if len(found) > 1 else found[0], model, max_norm=case.max_norm)


def train(case, group, model, optimizer, seen, reference, exchange, steps, config):
    for step in steps:
        optimizer.zero_grad()
        seen.clear()
        module, rank = model.module, group.rank
        for micro in range(case.micros[step]):
            used = case.used(module, step, micro, rank)
            is_last = micro == case.micros[step] - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(used, case.inputs(module, step, micro, rank))
                if loss.requires_grad:
                    loss.backward()
        report = optimizer.step()
        model.wait_for_params()
        of_ranks = exchange(step, rank, {name: list(own) for name, own in seen.items()})
        if rank == 0:
            assert report.norm == reference.step(of_ranks)
            assert not report.is_skipped
            expected = reference.values()
            for name, param in module.named_parameters():
                if param.requires_grad:
                    assert_close(case, config, name, param.detach(), expected[name])
        group.barrier()


def run_case(case, folder):
    reference = Reference(case)
    if not reference.names:
        return  # all is frozen, and an optimizer of torch has no parameters
    modules = [[case.new_module() for _ in range(case.num_ranks)] for _ in range(2)]
    slots = [{} for _ in range(case.num_ranks)]

    def run(group):
        def exchange(step, rank, seen):
            slots[rank][step] = seen
            group.barrier()
            return [of_rank[step] for of_rank in slots]

        (first, second), config, other = (one[group.rank] for one in modules), case.config, case.other_config
        seen = watch(first)
        model, optimizer = wrap(case, group, first, config)
        train(case, group, model, optimizer, seen, reference, exchange, range(case.before), config)
        seen = watch(second)
        new_model, new = wrap(case, group, second, other)
        if case.load == "sharded":
            trackbed.save(trackbed.sharded_state(model, optimizer), folder, group=group)
            trackbed.load_sharded_state(folder, new_model, new)
        else:
            new_model.load_state_dict(model.state_dict())
            new.load_full_state_dict(optimizer.full_state_dict())
        worse = config if case.is_rounded(config) else other
        train(case, group, new_model, new, seen, reference, exchange, range(case.before, case.steps), worse)
        state = new.full_state_dict()["state"]
        if group.rank == 0:
            mains = dict(zip(reference.names, reference.mains, strict=True))
            assert_same_states(case, worse, state, reference.states(), mains)

    run_ranks(case.num_ranks, run)


def cases(count, num_ranks, first=0):
    return [Case.draw(number, num_ranks) for number in range(first, first + count)]


@pytest.mark.parametrize("number", range(40))
def test_a_drawn_model_is_trained_as_by_torch(number, tmp_path):
    run_case(Case.draw(number * 17, 1), tmp_path / "state")


@pytest.mark.parametrize("number", range(10))
def test_a_drawn_model_is_trained_as_by_torch_on_two_ranks(number, tmp_path):
    run_case(Case.draw(number * 31 + 5, 2), tmp_path / "state")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 50))
def test_two_thousand_drawn_models_are_trained_as_by_torch(first, tmp_path):
    for case in cases(50, 1, first):
        run_case(case, tmp_path / f"{case.seed}")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 25))
def test_three_hundred_drawn_models_are_trained_as_by_torch_on_two_ranks(first, tmp_path):
    for case in cases(25, 2, first):
        run_case(case, tmp_path / f"{case.seed}")


def test_each_optimizer_meets_each_configuration_at_least_five_times():
    found = [(kind, case.config) for case in cases(2000, 1) for kind in case.kinds]
    assert min(map(found.count, itertools.product(range(len(KINDS)), CONFIGS))) >= 5
    types = {param.dtype for case in cases(20, 1) for param in case.new_module().parameters()}
    assert types == {torch.float32, torch.float64, *LOW}
