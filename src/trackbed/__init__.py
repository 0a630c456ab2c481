"""Tokens in, gradients across, checkpoints out: the layers under a model in LLM pre-training.

Begin with `open_blend` and `BatchLoader` for data, `DistributedDataParallel` and `DataParallelOptimizer` for gradients,
`sharded_state`, `save` and `load_sharded_state` for checkpoints. Names and packages are imported when they are first
used. Each layer has more in its package: `trackbed.tokens`, `trackbed.preprocess`, `trackbed.datasets`,
`trackbed.builder`, `trackbed.blends`, `trackbed.loading`, `trackbed.grads`, `trackbed.optim` and
`trackbed.checkpoint`; `trackbed.megatron` puts them under Megatron Core's names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trackbed.version import __version__

if TYPE_CHECKING:
    from trackbed import blends as blends
    from trackbed import builder as builder
    from trackbed import checkpoint as checkpoint
    from trackbed import comm as comm
    from trackbed import datasets as datasets
    from trackbed import errors as errors
    from trackbed import grads as grads
    from trackbed import index as index
    from trackbed import loading as loading
    from trackbed import megatron as megatron
    from trackbed import optim as optim
    from trackbed import preprocess as preprocess
    from trackbed import tokens as tokens
    from trackbed.blends.open import Splits, open_blend
    from trackbed.checkpoint import (
        Checkpoint,
        ShardedObject,
        ShardedTensor,
        latest_checkpoint,
        load,
        open_checkpoint,
        save,
    )
    from trackbed.datasets import Batch
    from trackbed.datasets.blend.dataset import SplitDataset
    from trackbed.errors import (
        ArgumentError,
        BlendFileError,
        CacheError,
        CheckpointError,
        CollectiveError,
        FormatError,
        GradientError,
        OversampleError,
        PlanError,
        StoreError,
        TrackbedError,
    )
    from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
    from trackbed.loading.loader import BatchLoader
    from trackbed.optim import DataParallelOptimizer, StepReport, load_sharded_state, sharded_state

__all__ = [
    "ArgumentError",
    "Batch",
    "BatchLoader",
    "BlendFileError",
    "CacheError",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "DataParallelOptimizer",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FormatError",
    "GradientError",
    "OversampleError",
    "PlanError",
    "ShardedObject",
    "ShardedTensor",
    "SplitDataset",
    "Splits",
    "StepReport",
    "StoreError",
    "TrackbedError",
    "__version__",
    "latest_checkpoint",
    "load",
    "load_sharded_state",
    "open_blend",
    "open_checkpoint",
    "save",
    "sharded_state",
]

_MODULES = {
    "ArgumentError": "errors",
    "Batch": "datasets",
    "BatchLoader": "loading.loader",
    "BlendFileError": "errors",
    "CacheError": "errors",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "DataParallelOptimizer": "optim",
    "DistributedDataParallel": "grads",
    "DistributedDataParallelConfig": "grads",
    "FormatError": "errors",
    "GradientError": "errors",
    "OversampleError": "errors",
    "PlanError": "errors",
    "ShardedObject": "checkpoint",
    "ShardedTensor": "checkpoint",
    "SplitDataset": "datasets.blend.dataset",
    "Splits": "blends.open",
    "StepReport": "optim",
    "StoreError": "errors",
    "TrackbedError": "errors",
    "latest_checkpoint": "checkpoint",
    "load": "checkpoint",
    "load_sharded_state": "optim",
    "open_blend": "blends.open",
    "open_checkpoint": "checkpoint",
    "save": "checkpoint",
    "sharded_state": "optim",
}
_PACKAGES = (
    "blends",
    "builder",
    "checkpoint",
    "comm",
    "datasets",
    "errors",
    "grads",
    "index",
    "loading",
    "megatron",
    "optim",
    "preprocess",
    "tokens",
)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
