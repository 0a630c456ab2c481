"""Steps of optimizers on a GPU: as torch's, and from a state that was loaded."""

import copy
import math

import pytest
import torch
from torch import nn

import trackbed
from tests.gpu.card import DEVICE, IS_DRY, fewer, needs_cuda
from tests.gpu.syncs import no_sync_allowed
from trackbed.optim import global_norm

KINDS = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW neither": (torch.optim.AdamW, {"foreach": False}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
ALL_SAVED = {"foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True}}
SAVED = fewer(ALL_SAVED, "foreach", "fused")


def new_model(dtype=torch.float32, device=DEVICE):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).to(device, dtype)


def wrapped(kind=torch.optim.AdamW, options=None, *, sharded=True, dtype=torch.float32, device=DEVICE, **more):
    config = trackbed.DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=True, grad_reduce_in_fp32=dtype != torch.float32
    )
    wrapper = trackbed.DistributedDataParallel(new_model(dtype, device), config)
    inner = kind(wrapper.module.parameters(), lr=0.01, **(options or {}))
    return wrapper, trackbed.DataParallelOptimizer(inner, wrapper, **more)


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    first = next(model.parameters())
    x = torch.randn(16, 32, generator=generator).to(first.device, first.dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", fewer(KINDS, "AdamW fused", "SGD"))
def test_steps_have_the_bits_of_torch(kind, sharded, exact):
    """O1."""
    cls, options = KINDS[kind]
    plain = new_model()
    train(plain, cls(plain.parameters(), lr=0.01, **options), range(10))
    wrapper, optimizer = wrapped(cls, options, sharded=sharded)
    train(wrapper, optimizer, range(10))
    assert all(map(torch.equal, plain.parameters(), wrapper.module.parameters()))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_copies_in_fp32_are_stepped_as_by_hand(sharded, fused, exact):
    """O2."""
    plain = new_model(torch.bfloat16)
    mains = [nn.Parameter(parameter.detach().float()) for parameter in plain.parameters()]
    theirs = torch.optim.AdamW(mains, lr=0.01, fused=fused)
    for step in range(10):
        backward(plain, step)
        for main, parameter in zip(mains, plain.parameters(), strict=True):
            main.grad, parameter.grad = parameter.grad.float(), None
        theirs.step()
        with torch.no_grad():
            for main, parameter in zip(mains, plain.parameters(), strict=True):
                parameter.copy_(main)
    wrapper, optimizer = wrapped(options={"fused": fused}, sharded=sharded, dtype=torch.bfloat16)
    train(wrapper, optimizer, range(10))
    assert all(map(torch.equal, plain.parameters(), wrapper.module.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_a_copy_on_the_cpu(dtype):
    """O3."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(count, generator=generator).to(dtype) for count in (0, 1, 1000, 300_001)]
    gradients[2] *= 1e-6
    assert global_norm([gradient.to(DEVICE) for gradient in gradients]) == global_norm(gradients)


def test_gradients_are_clipped_by_the_factor_that_the_pages_state():
    """O3."""
    wrapper, optimizer = wrapped(torch.optim.SGD, {}, max_norm=1e-3)
    before = [parameter.detach().clone() for parameter in wrapper.module.parameters()]
    optimizer.zero_grad()
    backward(wrapper, 0)
    gradients = [parameter.main_grad.clone() for parameter in wrapper.module.parameters()]
    report = optimizer.step()
    norm = global_norm(gradients)
    factor = torch.tensor(1e-3 / (norm + 1e-6), dtype=torch.float32).item()
    assert report.norm == norm
    for old, gradient, parameter in zip(before, gradients, wrapper.module.parameters(), strict=True):
        torch.testing.assert_close(parameter, old - 0.01 * (gradient * factor), rtol=0, atol=1e-7)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("loaded", ["foreach", "fused"])
@pytest.mark.parametrize("saved", [*SAVED, *([] if IS_DRY else ["cpu"])])
def test_training_goes_on_from_a_checkpoint(saved, loaded, sharded, exact, tmp_path):
    """O4."""
    device = "cpu" if saved == "cpu" else DEVICE
    wrapper, optimizer = wrapped(options=SAVED.get(saved), sharded=sharded, device=device)
    train(wrapper, optimizer, range(5))
    trackbed.save(trackbed.sharded_state(wrapper, optimizer), tmp_path / "checkpoint")
    other, fresh = wrapped(options=SAVED[loaded], sharded=sharded)
    trackbed.load_sharded_state(tmp_path / "checkpoint", other, fresh)
    train(other, fresh, range(5, 8))
    if saved == loaded:
        train(wrapper, optimizer, range(5, 8))
        assert all(map(torch.equal, wrapper.module.parameters(), other.module.parameters()))
    with torch.no_grad():
        assert all(torch.isfinite(parameter).all() for parameter in other.module.parameters())


@pytest.mark.parametrize("loaded", ["foreach", "fused"])
@pytest.mark.parametrize("saved", ["foreach", "fused"])
def test_torch_reads_the_full_state(saved, loaded, exact):
    wrapper, optimizer = wrapped(options=SAVED[saved])
    train(wrapper, optimizer, range(5))
    plain = new_model()
    plain.load_state_dict(wrapper.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, **SAVED[saved])
    theirs.load_state_dict(copy.deepcopy(optimizer.full_state_dict()))
    other, fresh = wrapped(options=SAVED[loaded])
    other.load_state_dict(plain.state_dict())
    fresh.load_full_state_dict(copy.deepcopy(theirs.state_dict()))
    for model, stepped in ((plain, theirs), (other, fresh), (wrapper, optimizer)):
        train(model, stepped, range(5, 8))
    assert all(map(torch.equal, plain.parameters(), wrapper.module.parameters()))
    if saved == loaded:
        assert all(map(torch.equal, other.module.parameters(), wrapper.module.parameters()))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_are_not_finite_skip_the_step_and_halve_the_scale(value):
    """O5."""
    wrapper, optimizer = wrapped(loss_scale="dynamic", max_norm=1.0)
    before = [parameter.detach().clone() for parameter in wrapper.module.parameters()]
    optimizer.zero_grad()
    backward(wrapper, 0)
    next(wrapper.module.parameters()).main_grad.view(-1)[3] = value
    report = optimizer.step()
    assert not math.isfinite(report.norm)
    assert all(map(torch.equal, before, wrapper.module.parameters()))
    assert optimizer.loss_scale == 2.0**15


@needs_cuda
@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_step_does_not_block_on_the_gpu(is_tensor):
    """O6: a learning rate that is a tensor costs no wait, and the numbers of the step are polled for."""
    rate = torch.tensor(0.01, device=DEVICE) if is_tensor else 0.01
    config = trackbed.DistributedDataParallelConfig(overlap_grad_reduce=True)
    wrapper = trackbed.DistributedDataParallel(new_model(), config)
    inner = torch.optim.AdamW(wrapper.module.parameters(), lr=rate, fused=True)
    optimizer = trackbed.DataParallelOptimizer(inner, wrapper)
    train(wrapper, optimizer, range(2))
    optimizer.zero_grad()
    backward(wrapper, 3)
    with no_sync_allowed():
        optimizer.step()
