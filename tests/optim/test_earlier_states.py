"""States of one rank that an older Trackbed has saved: complete ones are loaded, parts are refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from trackbed import (
    DataParallelOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    load_sharded_state,
)
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError

GOLDEN = torch.load(Path(__file__).parent / "golden" / "states_of_ranks.pt", weights_only=True)
WHOLE = [name for name in GOLDEN if name != "sharded"]


def new(name, group=SOLO, **options):
    """The model and the optimizer that have saved a state, before their first step."""
    dtype = torch.bfloat16 if name.startswith("bfloat16") else torch.float32
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)).to(dtype)
    module[1].bias.requires_grad_(False)
    weights, biases = [layer.weight for layer in module], [layer.bias for layer in module]
    if name.endswith("two"):
        torchs = [
            torch.optim.SGD(weights[:2], lr=0.1, momentum=0.9),
            torch.optim.AdamW([weights[2], *biases], lr=0.05),
        ]
    else:
        torchs = torch.optim.AdamW([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.05}])
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), process_group=group)
    scale = "dynamic" if dtype == torch.bfloat16 else None
    return model, DataParallelOptimizer(torchs, model, max_norm=1.0, loss_scale=scale)


def step(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 3, dtype=model.module[0].weight.dtype)).square().sum()
    (loss * optimizer.loss_scale).backward()
    return optimizer.step()


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, state in one.items():
        assert state.keys() == other[name].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name][key])), (name, key)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("size", [1, 2])
def test_the_state_of_an_optimizer_that_is_not_sharded_is_loaded_as_the_complete_one(name, size):
    def run(group):
        saved = GOLDEN[name]
        pairs = [new(name, group) for _ in range(2)]
        for (model, optimizer), kind in zip(pairs, ("of a rank", "full"), strict=True):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved[kind])
        first, second = (optimizer.state_dict() for _, optimizer in pairs)
        assert_same(first["state"], saved["full"]["state"])
        assert_same(first["state"], second["state"])
        assert first["param_groups"] == second["param_groups"]
        reports = [step(*pair) for pair in pairs]
        assert reports[0] == reports[1]
        assert all(map(torch.equal, pairs[0][0].module.parameters(), pairs[1][0].module.parameters()))

    torch.set_num_threads(1)
    run_ranks(size, run)


@pytest.mark.parametrize("name", ["sharded", "float32, one"])
def test_a_sharded_optimizer_refuses_the_state_of_one_rank_and_says_what_to_do(name):
    _, optimizer = new("one", use_distributed_optimizer=True)
    text = r"must be that of all ranks, but is that of rank 0 of 1 alone, .* save sharded_state\(model, optimizer\) or"
    with pytest.raises(ArgumentError, match=f"^state of the optimizer: {text}"):
        optimizer.load_state_dict(GOLDEN[name]["of a rank"])


def test_the_part_of_one_of_several_ranks_is_refused_by_every_optimizer():
    _, optimizer = new("one")
    with pytest.raises(ArgumentError, match="is that of rank 1 of 2 alone"):
        optimizer.load_state_dict({**GOLDEN["sharded"]["of a rank"], "num_ranks": 2, "of_rank": 1})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"optimizer": None}, "must have 'optimizer', a mapping"),
        ({"main_params": None}, "must have 'main_params', a mapping"),
        ({"loss_scale": 1.0}, "must have 'loss_scale', a mapping"),
        (
            {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}},
            r"must have \[3, 2\] tensors, but have \[1\]",
        ),
    ],
)
def test_a_damaged_state_of_one_rank_is_refused_and_nothing_is_loaded(change, text):
    _, optimizer = new("one")
    before = optimizer.state_dict()
    with pytest.raises(ArgumentError, match=f"^state of the optimizer: .*{text}"):
        optimizer.load_state_dict({**GOLDEN["float32, one"]["of a rank"], **change})
    assert_same(optimizer.state_dict()["state"], before["state"])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_with_one_dimensional_tensors_is_loaded(size):
    folder = Path(__file__).parent / "golden" / "one-dimensional"
    expected = torch.load(folder.with_suffix(".pt"), weights_only=True)

    def run(group):
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).bfloat16()
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=10)
        model = DistributedDataParallel(module, config, process_group=group)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(module.parameters()), model)
        assert load_sharded_state(folder, model, optimizer) == {"step": 1}
        found, whole = optimizer.full_state_dict()["state"], expected["optimizer"]["state"]
        assert found.keys() == whole.keys()
        for name, fields in whole.items():
            assert all(torch.equal(found[name][field], value) for field, value in fields.items())
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected["model"].items())

    run_ranks(size, run)


def test_one_dimensional_tensors_are_loaded_into_an_optimizer_of_torch():
    folder = Path(__file__).parent / "golden" / "one-dimensional"
    expected = torch.load(folder.with_suffix(".pt"), weights_only=True)["optimizer"]["state"]
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    load_sharded_state(folder, module, optimizer, group=SOLO)
    for name, param in module.named_parameters():
        assert all(torch.equal(optimizer.state[param][field], expected[name][field]) for field in ("step", "exp_avg"))
