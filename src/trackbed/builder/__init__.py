"""The builder of datasets and their indices, on many ranks.

Names are looked up when they are first asked for, so that arithmetic over splits does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trackbed.builder.builder import BlendedMegatronDatasetBuilder, build_generic_dataset

__all__ = ["BlendedMegatronDatasetBuilder", "build_generic_dataset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.builder"), name)


def __dir__() -> list[str]:
    return __all__
