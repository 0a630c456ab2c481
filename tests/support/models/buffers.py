"""Buffers without a wrapper, on one rank of a group that need not exist."""

from dataclasses import dataclass

import torch
from torch import nn

from trackbed.grads import _ParamAndGradBuffer
from trackbed.megatron import DistributedDataParallelConfig


@dataclass(frozen=True)
class Ranks:
    """The part of a process group that a buffer needs."""

    number: int = 0
    count: int = 1

    def rank(self):
        return self.number

    def size(self):
        return self.count


def parameters(*shapes, dtype=torch.float32):
    """Parameters whose elements are all different."""
    found, start = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        found.append(nn.Parameter(torch.arange(start, start + numel).to(dtype).view(shape)))
        start += numel
    return found


def new_buffer(params, ranks=Ranks(), *, bucket_size=None, param_dtype=None, factor=1.0, **options):
    names = {param: f"p{number}" for number, param in enumerate(params)}
    config = options.pop("config", None) or DistributedDataParallelConfig(**options)
    dtype = params[0].dtype
    grad_dtype = torch.float32 if config.grad_reduce_in_fp32 else dtype
    indices = list(range(len(params)))
    return _ParamAndGradBuffer(
        config, param_dtype or dtype, grad_dtype, params, ranks, bucket_size, names, factor, indices, False
    )
