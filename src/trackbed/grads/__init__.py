"""Buffers of parameters and gradients, and the communication of gradients between data-parallel ranks."""

from trackbed.grads.config import DistributedDataParallelConfig
from trackbed.grads.ddp import DistributedDataParallel
from trackbed.grads.layout import Layout, ParameterPieces, ParameterSpec, plan_layout

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Layout",
    "ParameterPieces",
    "ParameterSpec",
    "plan_layout",
]
