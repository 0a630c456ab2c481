"""After a state is loaded, the number of steps lies where torch's optimizers would have made it."""

import copy

import pytest
import torch

from trackbed.comm import SOLO
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer
from trackbed.optim.torch_optimizers import place_steps

OPTIONS = [{"fused": True}, {"capturable": True}, {"foreach": True}, {}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_step_lies_where_the_kernels_read_it(options, where):
    param = torch.nn.Parameter(torch.zeros(4, device="meta"))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    optimizer.param_groups[0].update(options)
    step = torch.tensor(3.0, dtype=torch.float64, device=where)
    optimizer.state[param] = {"step": step, "exp_avg": torch.zeros(4, device="meta")}
    if where == "meta" and not (options.get("fused") or options.get("capturable")):
        return  # a tensor without a value cannot be copied
    place_steps(optimizer)
    found = optimizer.state[param]["step"]
    if options.get("fused") or options.get("capturable"):
        assert (found.device.type, found.dtype) == ("meta", torch.float32)
    else:
        assert found is step


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "NAdam", "RAdam", "Adadelta", "RMSprop", "SGD"])
@pytest.mark.parametrize("load", ["full", "split"])
def test_a_loaded_state_is_stepped_by_every_kind_of_update(options, kind, load):
    cls, option = getattr(torch.optim, kind), next(iter(options), None)
    if option and option not in cls.__init__.__code__.co_varnames:
        pytest.skip(f"{kind} has no option {option}")

    def new():
        torch.manual_seed(0)
        model = DistributedDataParallel(
            torch.nn.Linear(3, 3), DistributedDataParallelConfig(use_distributed_optimizer=True), process_group=SOLO
        )
        return model, DataParallelOptimizer(cls(model.parameters(), lr=0.01, **options), model)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = new()
    step(model, optimizer)
    fresh_model, fresh = new()
    fresh_model.load_state_dict(model.state_dict())
    if load == "full":
        fresh.load_full_state_dict(copy.deepcopy(optimizer.full_state_dict()))
    else:
        state, parts = optimizer.split_state_dict()
        tensors = {}
        for part in parts:
            tensors.setdefault(part.name, {})[part.key] = part.value.reshape(-1).clone()
        fresh.load_split_state_dict(copy.deepcopy(state), tensors)
    step(model, optimizer)
    step(fresh_model, fresh)
    assert all(map(torch.equal, model.parameters(), fresh_model.parameters()))
