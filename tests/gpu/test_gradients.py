"""Gradients and parameters of one rank on a GPU, over NCCL and over collectives that end late."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trackbed
from tests.gpu.card import DEVICE, fewer, needs_cuda
from tests.gpu.delayed import DelayedCollectives
from tests.gpu.syncs import no_sync_allowed
from tests.support.models.data_parallel import TYPES as ALL_TYPES
from tests.support.models.data_parallel import WAYS as ALL_WAYS
from tests.support.models.data_parallel import Case, loss_of, reference, run_steps, train, wrap
from trackbed.grads import agreement
from trackbed.grads.collectives import Label, TorchCollectives
from trackbed.grads.collectives.protocol import shard_of

TYPES, WAYS = fewer(ALL_TYPES, "bf16"), fewer(ALL_WAYS, "sharded, overlap, many buckets")
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
BACKENDS = {
    "nccl": {"backend": "nccl"},
    "cuda:nccl": {"backend": "cuda:nccl"},
    "mixed": {"backend": "cpu:gloo,cuda:nccl"},
    "none": {"backend": None},
    "device_id": {"backend": None, "device_id": 0},
}


def case_of(kind, way, **options):
    dtype, more = ALL_TYPES[kind]
    return Case(dtype, steps=5, device=DEVICE, options={**more, **ALL_WAYS[way], **options})


@pytest.mark.parametrize("kind", TYPES)
def test_training_is_that_of_one_process_that_adds_by_itself(kind, exact):
    """G2, first half: without collectives."""
    wanted = reference(1, case_of(kind, next(iter(WAYS))))[1].digest()
    for way in WAYS:
        assert train(None, case_of(kind, way)).digest() == wanted, way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_about_those_of_the_cpu(dtype):
    case = Case(dtype, num_micro=2, steps=5, options={**SHARDED, "bucket_size": 700})
    on_cpu = train(None, case)
    losses, _ = run_steps(*wrap(None, dataclasses.replace(case, device=DEVICE)), case)
    assert losses == pytest.approx(on_cpu.losses, rel=1e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("kind", TYPES)
def test_training_over_nccl_has_the_same_bits_as_without(kind, exact, process_group):
    """G2."""
    group = process_group()
    for way in WAYS:
        found = train(group, case_of(kind, way, collectives="torch")).digest()
        assert found == train(None, case_of(kind, way)).digest(), way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", fewer(BACKENDS, "nccl"))
def test_every_spelling_of_the_backend_trains_and_saves(name, way, process_group, tmp_path):
    """G1."""
    options = dict(BACKENDS[name])
    group = process_group(options.pop("backend"), **options)
    case = case_of("bf16 with fp32 gradients", way, collectives="torch")
    wrapper, optimizer = wrap(group, case)
    with wrapper.guarded():
        run_steps(wrapper, optimizer, case, stop=3)
        wrapper.broadcast_params()
        optimizer.full_state_dict()
        trackbed.save(trackbed.sharded_state(wrapper, optimizer), tmp_path / "checkpoint")
        other, fresh = wrap(group, case)
        trackbed.load_sharded_state(tmp_path / "checkpoint", other, fresh)
        run_steps(wrapper, optimizer, case, start=3)
        run_steps(other, fresh, case, start=3)
    assert all(map(torch.equal, wrapper.module.parameters(), other.module.parameters()))


def test_collectives_of_nccl_on_one_rank(process_group):
    collectives = TorchCollectives(process_group())
    buffer = torch.arange(8.0, device=DEVICE)
    options = {"scale": 0.5, "average": False, "label": Label()}
    collectives.all_reduce([buffer], **options).wait()
    collectives.reduce_scatter([buffer], **options).wait()
    collectives.all_gather([buffer], label=Label()).wait()
    collectives.broadcast([buffer], source=0).wait()
    assert torch.equal(buffer.cpu(), torch.arange(8.0) / 4)
    assert shard_of(buffer, 0, 1).numel() == 8


@pytest.mark.parametrize("sharded", [False, True])
def test_several_buffers_of_a_bucket_group_are_one_operation(sharded, process_group):
    """G5: `_CoalescingManager` is no work."""
    collectives = TorchCollectives(process_group())
    buffers = [torch.arange(8.0, device=DEVICE), torch.arange(4, device=DEVICE, dtype=torch.bfloat16)]
    reduce = collectives.reduce_scatter if sharded else collectives.all_reduce
    work = reduce(buffers, scale=1.0, average=False, label=Label())
    work.wait()
    torch.cuda.synchronize()
    assert work.is_done()
    called = []
    gathered = collectives.all_gather(buffers, label=Label())
    if DEVICE == "cuda":
        gathered.on_done(lambda: called.append(True))
        gathered.wait()
        torch.cuda.synchronize()
        assert called
    gathered.wait()
    assert torch.equal(buffers[0].cpu(), torch.arange(8.0))


@contextlib.contextmanager
def delayed_by(seconds, monkeypatch, *, waits=True):
    """In the block, wrappers of one rank have collectives that end late."""
    collectives = DelayedCollectives(seconds, waits=waits)
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "SoloCollectives", lambda: collectives)
        yield collectives


@pytest.mark.parametrize("way", [way for way in WAYS if "many" in way])
@pytest.mark.parametrize("kind", TYPES)
def test_nothing_is_read_before_it_is_waited_for(kind, way, exact, monkeypatch):
    """G3."""
    wanted = train(None, case_of(kind, way)).digest()
    with delayed_by(0.02, monkeypatch) as collectives:
        assert train(None, case_of(kind, way)).digest() == wanted
    assert collectives.count >= 10


@pytest.mark.parametrize("way", [way for way in WAYS if "many" in way])
def test_what_is_not_waited_for_is_seen(way, exact, monkeypatch):
    """The twin of the test before: without its waits it fails."""
    wanted = train(None, case_of("bf16", way)).digest()
    with delayed_by(0.02, monkeypatch, waits=False):
        assert train(None, case_of("bf16", way)).digest() != wanted


@needs_cuda
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("collectives", ["auto", "torch"])
def test_a_backward_pass_does_not_wait_for_the_gpu(collectives, checks, sharded, process_group):
    """G4."""
    options = {**SHARDED, "use_distributed_optimizer": sharded, "overlap_param_gather": sharded}
    case = case_of("bf16 with fp32 gradients", next(iter(WAYS)), **options, check_for_nan_in_grad=checks)
    case = dataclasses.replace(case, options={**case.options, "collectives": collectives})
    wrapper, optimizer = wrap(process_group(), case)
    run_steps(wrapper, optimizer, case, stop=2)
    optimizer.zero_grad()
    tokens = torch.zeros(6, 5, dtype=torch.long, device=DEVICE)
    with no_sync_allowed():
        wrapper(tokens).float().square().mean().backward()
        wrapper.finish_grad_sync()


class Odd(nn.Module):
    """Parameters that are strided, channels last, empty, and of no dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.randn(6, 8).t())
        self.image = nn.Conv2d(3, 4, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        features = self.image(x).flatten(1)[:, :8] @ self.turned
        return features * self.scale + self.empty.sum()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("torch_collectives", [False, True])
def test_odd_parameters_are_trained_as_by_torch(torch_collectives, sharded, fused, exact, process_group):
    """G6."""
    batches = torch.randn(4, 2, 3, 6, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def new():
        return Odd().to(DEVICE).to(memory_format=torch.channels_last)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    plain = new()
    theirs = adamw(plain)
    wrapper = trackbed.DistributedDataParallel(
        new(),
        trackbed.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=True,
            collectives="torch" if torch_collectives else "auto",
        ),
        process_group=process_group() if torch_collectives else None,
    )
    ours = trackbed.DataParallelOptimizer(adamw(wrapper.module), wrapper)
    for batch in batches:
        for model, optimizer in ((plain, theirs), (wrapper, ours)):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), wrapper.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@needs_cuda
@pytest.mark.parametrize("way", [way for way in WAYS if "many" in way])
def test_a_program_may_work_on_a_stream_of_its_own(way, exact, monkeypatch):
    """G7, without readers on a second stream."""
    case = case_of("fp32", way)
    wanted = train(None, case).digest()
    with delayed_by(0.02, monkeypatch):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = train(None, case)
        side.synchronize()
    assert found.digest() == wanted


@needs_cuda
def test_a_second_stream_that_reads_parameters_takes_no_wait_away(exact, monkeypatch):
    """G7: an evaluation on a side stream between the step and the next forward pass."""
    case = case_of("fp32", "sharded, overlap, many buckets")
    wanted = train(None, case).digest()
    with delayed_by(0.05, monkeypatch):
        wrapper, optimizer = wrap(None, case)
        side = torch.cuda.Stream()
        norms = []
        for step in range(case.steps):
            norms += run_steps(wrapper, optimizer, case, start=step, stop=step + 1)[1]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), torch.no_grad():
                assert torch.isfinite(loss_of(wrapper, step, 1))
        found = train(None, dataclasses.replace(case, steps=0))
        found = dataclasses.replace(
            found,
            norms=norms,
            parameters={name: value.clone() for name, value in wrapper.state_dict().items()},
            state=optimizer.full_state_dict(),
        )
    assert found.digest() == wanted


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_activation_checkpoints(overlap, is_reentrant, exact):
    """G9."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=is_reentrant).relu()
            return x

    model, plain = Checkpointed().to(DEVICE), Checkpointed().to(DEVICE)
    config = trackbed.DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap, bucket_size=70
    )
    wrapper = trackbed.DistributedDataParallel(model, config)
    ours = trackbed.DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), wrapper)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        x = torch.full((2, 8), 0.1 * step + 0.1, device=DEVICE, requires_grad=True)
        for net, optimizer in ((wrapper, ours), (plain, theirs)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@needs_cuda
def test_memory_is_that_of_the_buffers():
    """G10: weights and gradients of fp32, two moments, and hardly more."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = nn.Sequential(*[nn.Linear(2048, 2048, device=DEVICE) for _ in range(16)])
    count = sum(parameter.numel() for parameter in model.parameters())
    wrapper = trackbed.DistributedDataParallel(model, trackbed.DistributedDataParallelConfig(overlap_grad_reduce=True))
    optimizer = trackbed.DataParallelOptimizer(torch.optim.AdamW(model.parameters(), fused=True), wrapper, max_norm=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        wrapper(torch.ones(4, 2048, device=DEVICE)).sum().backward()
        optimizer.step()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 16 * count + (64 << 20), f"{used / count:.2f} bytes a parameter"


@pytest.mark.parametrize("collectives", ["auto", "torch"])
def test_large_gradients_of_fp16_are_no_infinities_and_a_nan_is_named(collectives, process_group):
    """G11."""
    model = nn.Linear(4096, 4, bias=False).to(DEVICE, torch.float16)
    config = trackbed.DistributedDataParallelConfig(
        overlap_grad_reduce=True, check_for_nan_in_grad=True, collectives=collectives
    )
    wrapper = trackbed.DistributedDataParallel(model, config, process_group=process_group())
    x = torch.full((1, 4096), 1000.0, device=DEVICE, dtype=torch.float16)
    wrapper(x).sum().backward()
    wrapper.finish_grad_sync()
    wrapper.zero_grad_buffer()
    x[0, 7] = float("nan")

    def reduce():
        wrapper(x).sum().backward()
        wrapper.finish_grad_sync()

    with pytest.raises(trackbed.TrackbedError, match="weight"):
        reduce()


@needs_cuda
def test_buffers_leave_the_gpu_and_come_back():
    wrapper, _ = wrap(None, case_of("fp32", "sharded, overlap, many buckets"))
    before = [parameter.detach().cpu().clone() for parameter in wrapper.module.parameters()]
    for buffer in wrapper.buffers + wrapper.expert_parallel_buffers:
        buffer.offload_to_cpu()
        assert buffer.grad_data.untyped_storage().nbytes() == 0
        buffer.reload_from_cpu()
        assert not buffer.grad_data.any()
    after = [parameter.detach().cpu() for parameter in wrapper.module.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@needs_cuda
@pytest.mark.parametrize("when", ["before", "blocks", "after"])
def test_compiled_models(when):
    """G8."""

    def new():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]).to(DEVICE)

    def trained(compiled):
        torch._dynamo.reset()
        model = new()
        if compiled and when == "blocks":
            for block in model:
                block.compile(backend="aot_eager")
        if compiled and when == "before":
            model.compile(backend="aot_eager")
        config = trackbed.DistributedDataParallelConfig(**SHARDED, bucket_size=5000)
        wrapper = trackbed.DistributedDataParallel(model, config)
        optimizer = trackbed.DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), wrapper)
        if compiled and when == "after":
            wrapper.compile(backend="aot_eager")
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = wrapper(torch.full((8, 64), 0.1 * (step + 1), device=DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert trained(True) == pytest.approx(trained(False), rel=1e-3)
