"""Checkpoints of tensors on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import trackbed
from tests.gpu.card import DEVICE, needs_cuda, scaled, sleep

TYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def random_bits(dtype, *shape):
    """A tensor of random values; of floats, of random bits without those of NaN."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(0, 100, shape, generator=generator).to(torch.float32).to(dtype)


def as_bytes(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def whole(name, tensor, shape=None):
    """The one shard of a tensor, of the only rank."""
    return trackbed.ShardedTensor.from_rank_offsets(name, tensor)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_comes_back_with_its_bits(dtype, is_sharded, tmp_path):
    """C1, C6."""
    content = random_bits(dtype, 33, 7)
    tensor = content.to(DEVICE)
    state = {"w": whole("w", tensor) if is_sharded else tensor}
    trackbed.save(state, tmp_path / "checkpoint")
    if not is_sharded:
        found = trackbed.load(tmp_path / "checkpoint")["w"]
        assert found.dtype == dtype
        assert torch.equal(as_bytes(found), as_bytes(content))
        return
    for target in (torch.zeros_like(tensor), torch.zeros_like(content)):
        found = trackbed.load({"w": whole("w", target)}, tmp_path / "checkpoint")["w"]
        assert found is target
        assert torch.equal(as_bytes(target), as_bytes(content))


VIEWS = {
    "turned": lambda base: base.t(),
    "every second": lambda base: base[:, ::2],
    "expanded": lambda base: base[:1].expand(40, base.shape[1]),
    "channels last": lambda base: base[:64].reshape(2, 4, 8, -1).to(memory_format=torch.channels_last),
    "conjugate": lambda base: torch.complex(base, base + 1).conj(),
    "negative": lambda base: torch.complex(base, base + 1).conj().imag,
    "empty": lambda base: base[:0],
    "scalar": lambda base: base[3, 4],
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_memory_order_comes_back(view, tmp_path):
    """C2."""
    tensor = VIEWS[view](torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE))
    trackbed.save({"plain": tensor, "shard": whole("shard", tensor)}, tmp_path / "checkpoint")
    target = torch.zeros(tensor.shape, dtype=tensor.dtype, device=DEVICE)
    found = trackbed.load({"shard": whole("shard", target)}, tmp_path / "checkpoint")
    assert torch.equal(target, tensor.resolve_conj().resolve_neg())
    assert torch.equal(found["plain"].to(DEVICE), tensor)


def test_a_tensor_of_more_than_two_gib(tmp_path):
    """C2."""
    tensor = torch.arange(scaled((2 << 30) // 4 + 50_000_000), dtype=torch.int32, device=DEVICE)
    trackbed.save({"w": whole("w", tensor)}, tmp_path / "checkpoint", direct=False)
    target = torch.zeros_like(tensor)
    trackbed.load({"w": whole("w", target)}, tmp_path / "checkpoint")
    assert torch.equal(tensor, target)


@needs_cuda
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_value_that_is_still_to_be_written_is_saved(is_sharded, tmp_path):
    """C3: the kernel runs on the stream from which the program saves."""
    tensor = torch.zeros(1 << 20, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        sleep(0.2)
        tensor.fill_(7.0)
        trackbed.save({"w": whole("w", tensor) if is_sharded else tensor}, tmp_path / "checkpoint")
    target = torch.zeros(1 << 20)
    state = {"w": whole("w", target)} if is_sharded else None
    found = trackbed.load(state, tmp_path / "checkpoint")["w"] if state else trackbed.load(tmp_path / "checkpoint")["w"]
    assert bool((found == 7.0).all())


@needs_cuda
@pytest.mark.parametrize("on_side_stream", [False, True])
def test_a_value_that_an_older_kernel_writes_is_replaced(on_side_stream, tmp_path):
    """C4."""
    trackbed.save({"w": whole("w", torch.full((1 << 20,), 7.0))}, tmp_path / "checkpoint")
    target = torch.zeros(1 << 20, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()):
        sleep(0.5)
        target.fill_(-1.0)
        trackbed.load({"w": whole("w", target)}, tmp_path / "checkpoint")
    torch.cuda.synchronize()
    assert bool((target == 7.0).all())


def test_torch_and_the_command_read_it(tmp_path):
    """C5."""
    tensors = {f"w{number}": torch.randn(50, 30, device=DEVICE) for number in range(5)}
    trackbed.save({name: whole(name, tensor) for name, tensor in tensors.items()}, tmp_path / "checkpoint")
    found = {name: torch.zeros(50, 30) for name in tensors}
    load_dcp(found, storage_reader=FileSystemReader(tmp_path / "checkpoint"), no_dist=True)
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())
    command = [sys.executable, "-m", "trackbed", "ckpt", "verify", str(tmp_path / "checkpoint")]
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("target", ["strided", "narrower"])
def test_targets_with_gaps_and_of_another_type(target, tmp_path):
    """C6."""
    tensor = torch.randn(64, 48, device=DEVICE)
    trackbed.save({"w": whole("w", tensor)}, tmp_path / "checkpoint")
    if target == "strided":
        into = torch.zeros(48, 64, device=DEVICE).t()
        trackbed.load({"w": whole("w", into)}, tmp_path / "checkpoint")
        assert torch.equal(into, tensor)
    else:
        into = torch.zeros(64, 48, device=DEVICE, dtype=torch.bfloat16)
        trackbed.load({"w": whole("w", into)}, tmp_path / "checkpoint", allow_cast=True)
        assert torch.equal(into, tensor.bfloat16())


def test_a_process_without_a_gpu_loads_it(tmp_path):
    """C7."""
    trackbed.save({"w": torch.full((4,), 7.0, device=DEVICE)}, tmp_path / "checkpoint")
    program = "import sys, trackbed; print(trackbed.load(sys.argv[1])['w'].sum().item())"
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "checkpoint")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout == "28.0\n"


@pytest.mark.parametrize("kind", ["copied", "deferred"])
def test_a_save_in_the_background_has_the_values_of_its_moment(kind, tmp_path):
    """Memory of the slab is page-locked. With "deferred" the stream of the step waits for the copies."""
    module = torch.nn.Linear(1024, 1024, device=DEVICE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)

    def make_step():
        module(torch.ones(2, 1024, device=DEVICE)).square().mean().backward()
        optimizer.step()

    def values():
        exp_avgs = [state["exp_avg"] for state in optimizer.state.values()]
        return [one.detach().clone() for one in (*module.parameters(), *exp_avgs)]

    with trackbed.Checkpointer(tmp_path, snapshot=kind) as checkpointer:
        make_step()
        checkpointer.prepare(trackbed.sharded_state(module, optimizer))
        for step in range(3):
            before = values()
            sleep(0.1)  # the copies begin when the stream gets to them
            checkpointer.save(step, trackbed.sharded_state(module, optimizer))
            make_step()
            assert not torch.equal(module.weight, before[0])
            checkpointer.wait()
            after = values()
            checkpointer.load_sharded_state(module, optimizer, step=step)
            assert all(map(torch.equal, values(), before))
            with torch.no_grad():
                for mine, value in zip(module.parameters(), after, strict=False):
                    mine.copy_(value)
