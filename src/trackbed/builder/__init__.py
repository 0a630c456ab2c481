"""The builder of datasets and their indices, on many ranks; and blend files.

Names are looked up when they are first asked for, so that a plan does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trackbed.builder.blend_file import (
        BlendFile,
        BlendPlan,
        MeasuredBlend,
        StatedTokenizer,
        measure_blend,
        plan_blend,
        read_blend_file,
    )
    from trackbed.builder.builder import BlendedMegatronDatasetBuilder, build_generic_dataset

__all__ = [
    "BlendFile",
    "BlendPlan",
    "BlendedMegatronDatasetBuilder",
    "MeasuredBlend",
    "StatedTokenizer",
    "build_generic_dataset",
    "measure_blend",
    "plan_blend",
    "read_blend_file",
]


def __getattr__(name: str) -> Any:
    for module in ("blend_file", "builder") if name in __all__ else ():  # the last one imports torch
        found = import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return __all__
