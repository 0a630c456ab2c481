"""Several optimizers of torch train one model, with one norm, one clip and one state."""

import copy

import pytest
import torch
from torch import nn

import trackbed
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CheckpointError, CollectiveError, GradientError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer, global_norm

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5}
WAYS = {
    "default": {},
    "overlap": OVERLAP,
    "sharded": {"use_distributed_optimizer": True},
    "sharded, overlap": OVERLAP | {"use_distributed_optimizer": True, "overlap_param_gather": True},
}
WHOLE = ["default", "overlap"]
TYPES = [torch.float32, torch.bfloat16]


def new_module(dtype=torch.float32):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    module = module.to_empty(device="cpu")
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(generator=source)
    return module.to(dtype)


def muon_and_adamw(module):
    matrices = [param for param in module.parameters() if param.ndim == 2]
    vectors = [param for param in module.parameters() if param.ndim != 2]
    groups = [{"params": vectors[:2]}, {"params": vectors[2:], "lr": 0.05}]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(groups, lr=0.02)]


def sgd_and_adam(module):
    params = list(module.parameters())
    return [torch.optim.SGD(params[::2], lr=0.1, momentum=0.9), torch.optim.Adam(params[1::2], lr=0.02)]


def wrap(group, way, dtype=torch.float32, make=sgd_and_adam, **arguments):
    module, config = new_module(dtype), DistributedDataParallelConfig(**WAYS[way])
    model = DistributedDataParallel(module, config, process_group=group)
    return model, DataParallelOptimizer(make(module), model, **arguments)


def inputs(step, rank, dtype):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def train(model, optimizer, start, stop):
    rank, dtype = model.dp_group.rank(), model.module[0].weight.dtype
    norms = []
    for step in range(start, stop):
        optimizer.zero_grad()
        model(inputs(step, rank, dtype)).square().mean().backward()
        norms.append(optimizer.step().norm)
    model.wait_for_params()
    return norms


def reference(make, dtype, size, stop, max_norm):
    """Parameters of the optimizers without a wrapper, with the mean of the ranks' gradients, and the norms."""
    module, norms = new_module(dtype), []
    mains = copy.deepcopy(module).float()
    optimizers = make(mains)
    for step in range(stop):
        gradients = []
        for rank in range(size):
            loss = module(inputs(step, rank, dtype)).square().mean()
            gradients.append(
                [gradient * (1 / size) for gradient in torch.autograd.grad(loss, list(module.parameters()))]
            )
        sums = [torch.stack(terms).float().sum(0).to(dtype) for terms in zip(*gradients, strict=True)]
        norms.append(global_norm(sums))
        factor = min(1.0, max_norm / (norms[-1] + 1e-6))
        for param, gradient in zip(mains.parameters(), sums, strict=True):
            param.grad = gradient.float() * torch.tensor(factor, dtype=torch.float32)
        for one in optimizers:
            one.step()
        module.load_state_dict(mains.state_dict())
    return [param.detach() for param in module.parameters()], norms


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("make", "way"), [(muon_and_adamw, way) for way in WHOLE] + [(sgd_and_adam, way) for way in WAYS]
)
def test_several_optimizers_train_as_without_a_wrapper_with_one_norm_and_clip(make, way, dtype, size):
    params, norms = reference(make, dtype, size, 3, 0.5)

    def run(group):
        model, optimizer = wrap(group, way, dtype, make, max_norm=0.5)
        assert train(model, optimizer, 0, 3) == norms
        assert all(map(torch.equal, model.module.parameters(), params))

    run_ranks(size, run)


def reload(load, old, new, folder, group):
    (model, optimizer), (new_model, its_optimizer) = old, new
    if load == "sharded":
        trackbed.save(trackbed.sharded_state(model, optimizer), folder, group=group)
        trackbed.load_sharded_state(folder, new_model, its_optimizer)
        return
    new_model.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("load", ["full", "sharded"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("make", "way"), [(muon_and_adamw, way) for way in WHOLE] + [(sgd_and_adam, way) for way in WAYS]
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(make, way, dtype, load, tmp_path):
    def run(group):
        pairs = [wrap(group, way, dtype, make) for _ in range(2)]
        train(*pairs[0], 0, 2)
        reload(load, *pairs, tmp_path / "state", group)
        for pair in pairs:
            train(*pair, 2, 4)
        assert all(map(torch.equal, pairs[0][0].module.parameters(), pairs[1][0].module.parameters()))

    run_ranks(2, run)


@pytest.mark.parametrize("way", WAYS)
def test_the_state_continues_in_every_other_layout(way, tmp_path):
    def run(group):
        model, optimizer = wrap(group, way)
        train(model, optimizer, 0, 2)
        trackbed.save(trackbed.sharded_state(model, optimizer), tmp_path / "state", group=group)
        train(model, optimizer, 2, 3)
        for other in WAYS:
            new_model, new = wrap(group, other)
            trackbed.load_sharded_state(tmp_path / "state", new_model, new)
            train(new_model, new, 2, 3)
            assert all(map(torch.equal, model.module.parameters(), new_model.module.parameters()))

    run_ranks(2, run)


def test_groups_are_those_of_the_optimizers_in_the_order_of_the_list_and_schedulers_work():
    module = new_module()
    model = DistributedDataParallel(module, process_group=SOLO)
    muon, adamw = muon_and_adamw(module)
    groups = [*muon.param_groups, *adamw.param_groups]
    optimizer = DataParallelOptimizer([muon, adamw], model)
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
    assert optimizer.optimizers == (muon, adamw)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in (muon, adamw)]
    train(model, optimizer, 0, 1)
    for scheduler in schedulers:
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01, 0.025]
    assert [group["lr"] for group in optimizer.full_state_dict()["param_groups"]] == [0.05, 0.01, 0.025]
    with pytest.raises(ArgumentError, match="optimizer: must be one alone, but there are 2: see optimizers"):
        optimizer.optimizer  # noqa: B018  it raises
    assert "Muon" in repr(optimizer)
    assert "AdamW" in repr(optimizer)


def test_the_state_is_by_name_with_the_class_of_each_optimizer():
    model, optimizer = wrap(SOLO, "default", make=muon_and_adamw)
    train(model, optimizer, 0, 1)
    state = optimizer.full_state_dict()
    assert state["classes"] == [["Muon", 1], ["AdamW", 2]]
    assert list(state["state"]["0.weight"]) == ["momentum_buffer"]
    assert set(state["state"]["0.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert [group["params"] for group in state["param_groups"]] == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight"],
        ["1.bias", "2.bias"],
    ]


def adam_and_sgd(module):
    return [type(other)(one.param_groups[0]["params"], lr=0.1) for one, other in zip_reversed(sgd_and_adam(module))]


def zip_reversed(pair):
    return zip(pair, pair[::-1], strict=True)


@pytest.mark.parametrize("load", ["full", "sharded"])
def test_a_state_of_other_classes_is_refused_by_name(load, tmp_path):
    old, new = wrap(SOLO, "default"), wrap(SOLO, "default", make=adam_and_sgd)
    train(*old, 0, 1)
    text = "must be of Adam with 1 group, SGD with 1 group, but is of SGD with 1 group, Adam with 1 group"
    with pytest.raises((ArgumentError, CheckpointError), match=text):
        reload(load, old, new, tmp_path / "state", SOLO)


def test_a_state_of_a_list_is_refused_by_one_optimizer_with_as_many_groups():
    def one_adam(module):
        params = list(module.parameters())
        return torch.optim.Adam([{"params": params[::2]}, {"params": params[1::2]}], lr=0.02)

    old, new = wrap(SOLO, "default"), wrap(SOLO, "default", make=one_adam)
    train(*old, 0, 1)
    with pytest.raises(ArgumentError, match="must be of Adam with 2 groups, but is of SGD with 1 group"):
        new[1].load_full_state_dict(old[1].full_state_dict())


@pytest.mark.parametrize("way", ["sharded", "sharded, overlap"])
def test_a_class_that_looks_at_matrices_is_refused_by_name_where_it_would_be_sharded(way):
    with pytest.raises(ArgumentError, match=r"not known of Muon: .* or use_distributed_optimizer=False"):
        wrap(SOLO, way, make=muon_and_adamw)


def test_a_parameter_in_two_optimizers_is_refused_by_name():
    module = new_module()
    model = DistributedDataParallel(module, process_group=SOLO)
    sgd, adam = sgd_and_adam(module)
    again = torch.optim.AdamW([module[1].weight])
    with pytest.raises(ArgumentError, match=r"in one optimizer of the list, but 1\.weight is in SGD and AdamW"):
        DataParallelOptimizer([sgd, adam, again], model)
    with pytest.raises(ArgumentError, match=r"0\.weight is in SGD and SGD"):
        DataParallelOptimizer([sgd, sgd], model)


@pytest.mark.parametrize(
    ("optimizers", "text"),
    [([], "but is an empty list"), ([None], "a list of some, but is of NoneType"), ({1: 2}, "but is of dict")],
)
def test_megatron_arguments_are_refused(optimizers, text):
    model = DistributedDataParallel(new_module(), process_group=SOLO)
    with pytest.raises(ArgumentError, match=text):
        DataParallelOptimizer(optimizers, model)


def test_a_list_of_one_is_that_one():
    def alone(module):
        return (torch.optim.AdamW(module.parameters(), lr=0.1),)

    model, optimizer = wrap(SOLO, "sharded", make=alone)
    train(model, optimizer, 0, 1)
    assert optimizer.optimizer is optimizer.optimizers[0]
    assert "classes" not in optimizer.state_dict()


def test_the_error_of_a_second_optimizer_names_the_list():
    module = new_module()
    model = DistributedDataParallel(module, process_group=SOLO)
    first, second = (DataParallelOptimizer(one, model) for one in muon_and_adamw(module))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(GradientError, match=r"give several of torch as a list, DataParallelOptimizer\(\[one, other\]"):
        first.step()
    assert second.step().norm > 0


def test_ranks_with_other_optimizers_are_refused():
    def run(group):
        model, optimizer = wrap(group, "default", make=sgd_and_adam if group.rank else adam_and_sgd)
        train(model, optimizer, 0, 1)

    with pytest.raises(CollectiveError, match="the class of the optimizer must be the same on every rank"):
        run_ranks(2, run)


def test_parameters_of_which_no_optimizer_has_any_stay_as_they_are():
    module = new_module()
    model = DistributedDataParallel(module, process_group=SOLO)
    before = module[2].weight.detach().clone()
    optimizer = DataParallelOptimizer(
        [torch.optim.SGD(module[0].parameters(), lr=0.1), torch.optim.Adam(module[1].parameters())], model
    )
    train(model, optimizer, 0, 1)
    assert torch.equal(module[2].weight, before)


def test_states_under_keys_that_are_no_parameters_are_those_of_their_optimizer():
    class Counting(torch.optim.SGD):
        def step(self):
            super().step()
            self.state["count"] = self.state.get("count", 0) + int(10 * self.param_groups[0]["lr"])

    def two(module):
        params = list(module.parameters())
        return [Counting(params[:2], lr=0.1), Counting(params[2:], lr=0.2)]

    old, new = wrap(SOLO, "default", make=two), wrap(SOLO, "default", make=two)
    train(*old, 0, 2)
    for load in ("full", "of a rank"):
        reload(load, old, new, None, SOLO)
        assert [one.state["count"] for one in new[1].optimizers] == [2, 4]
