"""Models that FSDP2 divides among the two ranks of `two_ranks.py`: saved, loaded in place, and trained on."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import trackbed
from tests.gpu.card import DEVICE
from trackbed.checkpoint.dcp import StorageReader, StorageWriter
from trackbed.comm import SOLO

OPTIMIZERS = {
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def new_model(seed: int) -> nn.Module:
    """A plain model, some of whose sizes are odd."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(17, 6), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 17)).to(DEVICE)


def new(kind: str, seed: int, *, offloads: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A divided model of bfloat16 products, and its optimizer."""
    model, mesh = new_model(seed), init_device_mesh(DEVICE, (2,))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if offloads:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, OPTIMIZERS[kind](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Trains on tokens of the number of the step. Returns the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(17, (4, 5), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors of a model and its optimizer on the host, by name."""
    found = dict(model.named_parameters())
    states = {f"{name}/{key}": value for name, one in found.items() for key, value in optimizer.state[one].items()}
    return {name: whole(value) for name, value in {**found, **states}.items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor on the host; parts on the host go through the GPU, where the ranks meet."""
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.to(DEVICE).full_tensor()
    return value.cpu().clone()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """True if all tensors have the same bits."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def trained(kind: str, folder: Path, *, offloads: bool = False) -> None:
    """D1, D2: goes on with the same losses, in place; and is the same in a plain model."""
    model, optimizer = new(kind, 1, offloads=offloads)
    train(model, optimizer, range(3))
    trackbed.save({**trackbed.sharded_state(model, optimizer), "step": 3}, folder)
    wanted = contents(model, optimizer)
    losses = train(model, optimizer, range(3, 6))
    other, fresh = new(kind, 2, offloads=offloads)
    places = [parameter.to_local().data_ptr() for parameter in other.parameters()]
    found = trackbed.load_sharded_state(folder, other, fresh)
    if places != [parameter.to_local().data_ptr() for parameter in other.parameters()] or found["step"] != 3:
        raise AssertionError("not loaded in place")
    for parameter in other.parameters():
        for name, value in fresh.state[parameter].items():
            if name != "step" and value.device != parameter.device:
                raise AssertionError(f"{name}: on {value.device}, the parameter on {parameter.device}")
    if not same(contents(other, fresh), wanted):
        raise AssertionError("other bits")
    if (again := train(other, fresh, range(3, 6))) != losses:
        raise AssertionError(f"{again} in place of {losses}")
    plain = new_model(3)
    alone = OPTIMIZERS[kind](plain.parameters())
    trackbed.load_sharded_state(folder, plain, alone, group=SOLO)
    if not same(contents(plain, alone), wanted):
        raise AssertionError("other bits in a plain model")


def doors(folder: Path) -> None:
    """D3: through torch's own functions, with our storage; and what they have written by `trackbed.load`."""
    model, _ = new("SGD", 1)
    state = {"model": model.state_dict(), "more": torch.arange(5.0, device=DEVICE)}
    dcp.save(state, storage_writer=StorageWriter(folder))
    other, _ = new("SGD", 2)
    target = {"model": other.state_dict(), "more": torch.zeros(5, device=DEVICE)}
    dcp.load(target, storage_reader=StorageReader(folder))
    wanted = {name: whole(value) for name, value in state["model"].items()}
    if not same({name: whole(value) for name, value in other.state_dict().items()}, wanted):
        raise AssertionError("dcp.load: other bits")
    third, _ = new("SGD", 3)
    trackbed.load({"model": third.state_dict(), "more": target["more"].zero_()}, folder)
    if not same({name: whole(value) for name, value in third.state_dict().items()}, wanted):
        raise AssertionError("load: other bits")
    if not torch.equal(target["more"], state["more"]):
        raise AssertionError("load: other bits of a plain tensor")


def generators() -> None:
    """D4: each rank's generator of the GPU goes on where it was."""
    torch.manual_seed(5 + dist.get_rank())
    torch.rand(3, device=DEVICE)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, device=DEVICE)
        folder = Path(shared[0]) / "saved"
        trackbed.save({"random": trackbed.random_states()}, folder)
        wanted = torch.rand(4, device=DEVICE)
        goes_on = trackbed.restore_random_states(trackbed.load(folder)["random"])
        dist.barrier()
    if not goes_on or not torch.equal(torch.rand(4, device=DEVICE), wanted):
        raise AssertionError("another stream")


def checks(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and function of each check."""
    for kind in OPTIMIZERS:
        yield f"divided, {kind}", lambda kind=kind: trained(kind, folder / f"divided {kind}")
    if not os.environ.get("TRACKBED_GPU_DRY"):
        place = folder / "offloaded"
        yield "divided, on the host", lambda: trained("AdamW foreach", place, offloads=True)
    yield "divided, through torch's functions", lambda: doors(folder / "doors")
    yield "random states", generators
