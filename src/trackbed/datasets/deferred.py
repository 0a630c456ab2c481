"""Indices that are opened at the first sample, and what to do where they are gone by then."""

from typing import Final

from trackbed.datasets.config import BlendedMegatronDatasetConfig

__all__ = ["advice_on_missing"]

_DEFERRED: Final = (
    "build it once without defer_npy_index_mmap, and see that path_to_cache leads to the same folder in every process"
)
_COPIED: Final = (
    "a copy of a dataset in another process builds nothing: see that path_to_cache leads to the same folder in every "
    "process, and that nothing is removed from it while the job runs"
)


def advice_on_missing(config: BlendedMegatronDatasetConfig) -> str:
    """End of the error for an index that must be there at the first sample, but is not.

    Args:
        config: that of the dataset: with `defer_npy_index_mmap` nothing was opened before; without it, this is a copy
            that was sent to another process.
    """
    return _DEFERRED if config.defer_npy_index_mmap else _COPIED
