"""Who builds which index, and how a blend is written down in a file.

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
    from trackbed.builder.plan_split import Shares, check_sizes, plan_shares

__all__ = [
    "BlendFile",
    "BlendPlan",
    "BlendedMegatronDatasetBuilder",
    "MeasuredBlend",
    "Shares",
    "StatedTokenizer",
    "build_generic_dataset",
    "check_sizes",
    "measure_blend",
    "plan_blend",
    "plan_shares",
    "read_blend_file",
]

_MODULES = {
    "BlendFile": "blend_file",
    "BlendPlan": "blend_file",
    "BlendedMegatronDatasetBuilder": "builder",
    "MeasuredBlend": "blend_file",
    "Shares": "plan_split",
    "StatedTokenizer": "blend_file",
    "build_generic_dataset": "builder",
    "check_sizes": "plan_split",
    "measure_blend": "blend_file",
    "plan_blend": "blend_file",
    "plan_shares": "plan_split",
    "read_blend_file": "blend_file",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
