"""The builder of datasets and their indices, on many ranks.

Names are looked up when they are first asked for, so that arithmetic over splits does not import torch.
"""

from typing import TYPE_CHECKING

from trackbed.lazy_names import lazy_names

if TYPE_CHECKING:
    from trackbed.builder.builder import BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder
    from trackbed.builder.builder import build_generic_dataset as build_generic_dataset

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "trackbed.builder.builder": "BlendedMegatronDatasetBuilder build_generic_dataset",
    },
)
