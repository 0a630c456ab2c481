"""A small model under the wrapper, and the gradients that it must have."""

import itertools

import torch
from torch import nn

from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig

ARGUMENTS = ("allow_unused", "observer", "expert_process_group", "disable_bucketing")


def layers(*widths, seed=0):
    """A chain of linear layers with the same numbers each time, also on ranks that are threads."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=generator)
    return model


def inputs(number, width=4):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 + number))


def wrap(group, model, **options):
    arguments = {name: options.pop(name) for name in ARGUMENTS if name in options}
    config = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(None, config, model, process_group=group, **arguments)


def backward(model, number, **options):
    """Runs one micro-batch."""
    model(inputs(number)).square().sum().backward(**options)


def gradients(model, size, numbers):
    """Gradients of some micro-batches, as the average over ranks, by name."""
    model.zero_grad()
    for number in numbers:
        backward(model, number)
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad / size
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def check(wrapper, wanted):
    """Compares the part of the gradients that this rank owns."""
    for buffer in wrapper.buffers + wrapper.expert_parallel_buffers:
        pieces = buffer.layout.pieces(buffer.data_parallel_group.rank())
        for number, start, stop in zip(*(part.tolist() for part in pieces), strict=True):
            name = buffer.layout.parameters[number].name
            found = buffer.params[number].main_grad.flatten()[start:stop]
            torch.testing.assert_close(
                found, wanted[name].flatten()[start:stop], msg=lambda text, name=name: name + text
            )
