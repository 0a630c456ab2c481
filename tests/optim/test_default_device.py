"""Internal tensors lie on the CPU, whatever the default device of torch is."""

import pytest
import torch
from torch import nn

import trackbed
from tests.support.models.default_device import needs_steps_on_cpu
from trackbed.comm import run_ranks
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

WAYS = {
    "default": {},
    "sharded, overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 3,
    },
}


def wrap(group, way, dtype):
    module = nn.Sequential(nn.Linear(3, 3, device="cpu"), nn.BatchNorm1d(3, device="cpu")).to(dtype)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.5)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**WAYS[way]), process_group=group)
    return model, DataParallelOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1), model, max_norm=1.0)


def step(model, optimizer):
    dtype = model.module[0].weight.dtype
    optimizer.zero_grad()
    inputs = torch.eye(3, device="cpu", dtype=dtype)
    (model(inputs) * inputs).sum().backward()
    optimizer.step()
    model.wait_for_params()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_default_device_changes_nothing_in_steps_saves_and_loads(way, dtype, size, tmp_path):
    needs_steps_on_cpu()

    def run(group):
        with torch.device("meta"):
            model, optimizer = wrap(group, way, dtype)
            step(model, optimizer)
            trackbed.save(trackbed.sharded_state(model, optimizer), tmp_path / "state-1", group=group)
            pairs = [(model, optimizer)]
            for load in ("sharded", "full"):
                new_model, new = wrap(group, way, dtype)
                if load == "sharded":
                    trackbed.load_sharded_state(tmp_path / "state-1", new_model, new)
                else:
                    new_model.load_state_dict(model.state_dict())
                if load == "full":
                    new.load_full_state_dict(optimizer.full_state_dict())
                pairs.append((new_model, new))
            assert trackbed.latest_checkpoint(tmp_path, group=group) == tmp_path / "state-1"
            found = trackbed.open_checkpoint(tmp_path / "state-1")["model.0.weight"][...]
            assert torch.equal(torch.as_tensor(found, device="cpu"), model.module[0].weight)
            for pair in pairs:
                step(*pair)
            for other, _ in pairs[1:]:
                assert all(map(torch.equal, model.module.parameters(), other.module.parameters()))

    run_ranks(size, run)


def test_ranks_compare_values_and_check_memory_of_parameters():
    def run(group):
        with torch.device("meta"):
            module = nn.Linear(2, 2, device="cpu")
            nn.init.ones_(module.weight)
            nn.init.ones_(module.bias)
            module.register_buffer("view", torch.ones(4, device="cpu")[::2])
            config = DistributedDataParallelConfig(use_distributed_optimizer=True)
            DistributedDataParallel(module, config, process_group=group, broadcast=False)

    run_ranks(2, run)
