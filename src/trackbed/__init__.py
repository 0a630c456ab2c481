"""Tokens in, gradients across, checkpoints out: the layers under a model in LLM pre-training.

The names are imported when they are first used. Each layer has more in its package: `trackbed.tokens`,
`trackbed.preprocess`, `trackbed.datasets`, `trackbed.loading`, `trackbed.grads`, `trackbed.optim` and
`trackbed.checkpoint`; `trackbed.megatron` puts them under Megatron Core's names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trackbed.version import __version__

if TYPE_CHECKING:
    from trackbed.checkpoint import load, save
    from trackbed.grads import DistributedDataParallel
    from trackbed.optim import DataParallelOptimizer
    from trackbed.top_level import BatchLoader, Splits, open_blend

__all__ = [
    "BatchLoader",
    "DataParallelOptimizer",
    "DistributedDataParallel",
    "Splits",
    "__version__",
    "load",
    "open_blend",
    "save",
]

_MODULES = {
    "BatchLoader": "top_level",
    "DataParallelOptimizer": "optim",
    "DistributedDataParallel": "grads",
    "Splits": "top_level",
    "load": "checkpoint",
    "open_blend": "top_level",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
