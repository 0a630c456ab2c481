"""Copies in float32 follow parameters of 16 bits that the program writes, and lose no bit where it puts them back."""

import itertools

import pytest
import torch
from torch import nn

import trackbed
from trackbed import megatron
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import GradientError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

WAYS = {
    "default": {},
    "overlap": {"overlap_grad_reduce": True, "bucket_size": 5},
    "sharded": {"use_distributed_optimizer": True},
    "sharded, overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 5,
    },
    "float32 gradients": {"grad_reduce_in_fp32": True},
}
TYPES = [torch.bfloat16, torch.float16]


def layers(dtype=torch.bfloat16):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module = module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(generator=generator)
    return module.to(dtype)


def wrap(group, way, dtype=torch.bfloat16, rate=0.0, form="torch"):
    module = layers(dtype)
    if form == "torch":
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**WAYS[way]), process_group=group)
    else:
        config = megatron.DistributedDataParallelConfig(**WAYS[way])
        model = megatron.DistributedDataParallel(None, config, module, process_group=group)
    return model, DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=rate), model)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3, dtype=model.module[0].weight.dtype)).sum().backward()
    optimizer.step()
    model.wait_for_params()


def mains(optimizer):
    return {name: state["main_param"] for name, state in optimizer.full_state_dict()["state"].items()}


def by_torch(model, optimizer, values, folder):
    model.module[0].load_state_dict(values)


def by_load_sharded_state(model, optimizer, values, folder):
    saved = nn.Linear(3, 3).to(values["weight"].dtype)
    saved.load_state_dict(values)
    if model.dp_group.rank() == 0:
        trackbed.save(trackbed.sharded_state(saved, group=SOLO), folder, group=SOLO)
    trackbed.load_sharded_state(folder, model.module[0], group=SOLO)


@torch.no_grad()
def by_copying(model, optimizer, values, folder):
    for name, value in values.items():
        model.module[0].get_parameter(name).copy_(value)


@torch.no_grad()
def in_place(model, optimizer, values, folder):
    for name, value in values.items():
        model.module[0].get_parameter(name).zero_().add_(value)


@torch.no_grad()
def by_elements(model, optimizer, values, folder):
    for name, value in values.items():
        model.module[0].get_parameter(name)[...] = value


@torch.no_grad()
def through_a_view(model, optimizer, values, folder):
    for name, value in values.items():
        model.module[0].get_parameter(name).view(-1).copy_(value.view(-1))


@torch.no_grad()
def through_detach(model, optimizer, values, folder):
    for name, value in values.items():
        model.module[0].get_parameter(name).detach().copy_(value)


@torch.no_grad()
def by_initialisation(model, optimizer, values, folder):
    for name in values:
        nn.init.constant_(model.module[0].get_parameter(name), 3.0)


@torch.inference_mode()
def in_inference_mode(model, optimizer, values, folder):
    for name, value in values.items():
        model.module[0].get_parameter(name).copy_(value)


@torch.no_grad()
def by_foreach(model, optimizer, values, folder):
    params = [model.module[0].get_parameter(name) for name in values]
    torch._foreach_copy_(params, list(values.values()))


def by_numpy(model, optimizer, values, folder):
    for name, value in values.items():
        param = model.module[0].get_parameter(name)
        param.detach().view(torch.int16).numpy()[...] = value.view(torch.int16).numpy()
    optimizer.reload_model_params()


def through_data(model, optimizer, values, folder):
    for name, value in values.items():
        model.module[0].get_parameter(name).data.copy_(value)
    optimizer.reload_model_params()


def of_the_whole_model(model, optimizer, values, folder):
    state = model.state_dict() | {f"0.{name}": value for name, value in values.items()}
    model.load_state_dict(state)


WRITES = [
    by_torch,
    by_load_sharded_state,
    by_copying,
    in_place,
    by_elements,
    through_a_view,
    through_detach,
    by_initialisation,
    in_inference_mode,
    by_foreach,
    by_numpy,
    through_data,
    of_the_whole_model,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_stays_and_is_in_the_next_state(way, write, tmp_path):
    for number, (dtype, form) in enumerate(itertools.product(TYPES, ["torch", "megatron"])):
        model, optimizer = wrap(SOLO, way, dtype, form=form)
        step(model, optimizer)
        before = mains(optimizer)
        values = {name: torch.full_like(value, 3.0) for name, value in model.module[0].state_dict().items()}
        write(model, optimizer, values, tmp_path / f"{number}")
        found = mains(optimizer)
        step(model, optimizer)
        assert set(model.module[0].weight.flatten().tolist() + model.module[0].bias.tolist()) == {3.0}
        for states in (found, mains(optimizer)):
            assert set(states["0.weight"].flatten().tolist()) == {3.0}
            assert torch.equal(states["1.weight"].reshape(3, 3), before["1.weight"])


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_take_over_what_each_has_written(way):
    def run(group):
        model, optimizer = wrap(group, way)
        step(model, optimizer)
        by_copying(model, optimizer, {"weight": torch.full((3, 3), 3.0)}, None)
        step(model, optimizer)
        return model.module[0].weight.tolist(), mains(optimizer)["0.weight"].tolist()

    assert run_ranks(2, run) == [([[3.0] * 3] * 3,) * 2] * 2


def put_back_by_copying(model, values):
    with torch.no_grad():
        for name, param in model.module.named_parameters():
            param.copy_(values[name])


def put_back_by_a_load(model, values):
    model.load_state_dict(values)


def put_back_by_loads_of_parts(model, values):
    for number, layer in enumerate(model.module):
        layer.load_state_dict({name: values[f"{number}.{name}"] for name, _ in layer.named_parameters()})


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("put_back", [put_back_by_copying, put_back_by_a_load, put_back_by_loads_of_parts])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_exchanged_for_an_evaluation_and_put_back_lose_no_bit(way, put_back, looks):
    """`looks` takes a state in between, which has the values of the moment."""

    def run(group):
        found = []
        for exchanges in (False, True):
            model, optimizer = wrap(group, way, rate=1e-3)
            for _ in range(3):
                step(model, optimizer)
                if exchanges:
                    kept = {name: value.clone() for name, value in model.state_dict().items()}
                    put_back(model, {name: torch.full_like(value, 7.0) for name, value in kept.items()})
                    with torch.no_grad():
                        model(torch.ones(1, 3, dtype=torch.bfloat16))
                    if looks:
                        assert set(mains(optimizer)["0.bias"].tolist()) == {7.0}
                    put_back(model, kept)
            found.append(mains(optimizer))
        assert any(not torch.equal(value, value.bfloat16().float()) for value in found[0].values())
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())

    run_ranks(2, run)


@pytest.mark.parametrize("way", WAYS)
def test_steps_and_gathers_are_not_taken_for_writes(way):
    def run(group):
        model, optimizer = wrap(group, way, rate=0.1)
        versions = list(optimizer._copies._versions)
        for _ in range(3):
            step(model, optimizer)
        assert optimizer._copies._versions == versions == optimizer._copies._count_changes()

    run_ranks(2, run)


def test_a_value_that_is_no_number_is_taken_over():
    model, optimizer = wrap(SOLO, "default")
    with torch.no_grad():
        model.module[0].bias[1] = float("nan")
    assert mains(optimizer)["0.bias"].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_through_an_old_reference_while_the_parameter_is_gathered_is_refused_by_name(dtype):
    def run(group):
        model, optimizer = wrap(group, "sharded, overlap", dtype)
        weight = model.module[1].weight
        step(model, optimizer)
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            weight.add_(1.0)
        with pytest.raises(GradientError, match=r"rank \d: parameters must stay .* but 1\.weight was written"):
            model.wait_for_params()

    run_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_after_a_wait_or_through_the_module_is_kept(dtype):
    def run(group):
        model, optimizer = wrap(group, "sharded, overlap", dtype)
        weight = model.module[1].weight
        for number in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                if number == 0:
                    model.wait_for_params()
                    weight.fill_(5.0)
                else:
                    model.module[1].weight.fill_(6.0 + number)
        step(model, optimizer)
        return weight.flatten().tolist()

    assert run_ranks(2, run) == [[8.0] * 9] * 2


def test_a_write_through_an_old_reference_on_a_single_rank_is_kept():
    model, optimizer = wrap(SOLO, "sharded, overlap")
    weight = model.module[1].weight
    step(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        weight.fill_(5.0)
    step(model, optimizer)
    assert set(weight.flatten().tolist()) == {5.0}
