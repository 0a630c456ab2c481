"""What decides the samples of a blend: the configuration that all dataset classes share."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Final

from trackbed.errors import ArgumentError
from trackbed.index.splits import (
    Bounds,
    Split,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from trackbed.kernels.integers import is_integer

__all__ = ["ORDERS", "Blend", "BlendedMegatronDatasetConfig", "Stage"]

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
"""Prefixes, and their weights or None."""

Stage = tuple[int, Sequence[float]]
"""First sample of a stage, and the weights from there on."""

_INSTANT_ONLY: Final = {
    "blend_stages": None,
    "blend_max_epochs": None,
    "blend_when_exhausted": "raise",
    "shuffle_block": 1,
    "shuffle_window": 1,
}

ORDERS: Final = ("megatron", "balanced", "instant")


@dataclass
class BlendedMegatronDatasetConfig:
    """Fields, order and defaults of megatron-core 0.16.1, then Trackbed's own as keywords.

    Raises:
        ArgumentError: fields that contradict each other or are out of range.
    """

    random_seed: int
    """Seed of every shuffle, in `[0, 2**32)`."""

    sequence_length: int
    """Tokens from one sample's start to the next, at least 1."""

    blend: Blend | None = None
    """Prefixes and weights of one blend, to be divided by `split`; weights None: by the datasets' lengths."""

    blend_per_split: list[Blend | None] | None = None
    """A blend of its own, or None, for training, validation and test; excludes `blend` and `split`."""

    multiple_validation_sets: bool | None = None
    """Return the datasets of the validation blend one by one instead of blended; with `blend_per_split`."""

    full_validation: bool | None = None
    """Validation reads its datasets once, whole: the size asked for must be None."""

    split: str | None = None
    """Shares of training, validation and test, such as "99,1,0"; with `blend`."""

    split_matrix: list[Bounds | None] | None = field(init=False, default=None)
    """Where each share begins and ends, made from `split`."""

    num_dataset_builder_threads: int = 1
    """Threads that build datasets of a blend, at least 1."""

    path_to_cache: str | None = None
    """Folder of the indices. None: `<prefix>/cache/<class>_indices` for datasets, and memory for blends."""

    mmap_bin_files: bool = True
    """Whether to map `.bin` files, or to read them piece by piece."""

    mock: bool = field(init=False, default=False)
    """Whether data is made up: True where there is neither `blend` nor `blend_per_split`."""

    tokenizer: Any | None = None
    """An object with `eod`, `pad`, `vocab_size` and `unique_identifiers`."""

    mid_level_dataset_surplus: float = 0.005
    """Samples built per dataset of a blend beyond its share, as a fraction of it, at least 0."""

    allow_ambiguous_pad_tokens: bool | None = False
    """Whether a padding id that is another special token's too is still masked out."""

    fast_cache_load: bool = False
    """Open indices without building any: all of them must be in `path_to_cache`."""

    defer_npy_index_mmap: bool = False
    """Open indices when a sample is first asked for: all of them must be in `path_to_cache`."""

    order: str = field(default="megatron", kw_only=True)
    """Which sample comes k-th: "megatron" is Megatron Core's order, bit for bit. "balanced" blends in exact
    proportions, shuffled as a whole. "instant" builds no index at all, and shuffles samples where "megatron" shuffles
    documents."""

    blend_stages: Sequence[Stage] | None = field(default=None, kw_only=True)
    """First sample and `[K]` weights of each stage of the training blend, with `order="instant"`: from that sample on
    its weights hold instead of the blend's. None for one blend all the way."""

    blend_max_epochs: Sequence[float | None] | None = field(default=None, kw_only=True)
    """`[K]` epochs that each dataset may give to the training blend, with `order="instant"`; None for any number."""

    blend_when_exhausted: str = field(default="raise", kw_only=True)
    """What happens where a dataset has given its epochs: "raise" is an error at construction, with "reweight" the blend
    goes on without it, and a warning says from which sample on."""

    shuffle_block: int = field(default=1, kw_only=True)
    """Samples next to each other in the file that `order="instant"` moves as one before it mixes them, at least 1:
    larger blocks are read contiguously and shuffled less thoroughly."""

    shuffle_window: int = field(default=1, kw_only=True)
    """Blocks that come one after the other and whose samples are mixed, at least 1; of no effect with blocks of 1."""

    renormalize_blend_weights: bool | None = field(default=None, kw_only=True)
    """None: the sizes and weights of megatron-core 0.16.1. True or False: those of 0.10, and its names."""

    def __post_init__(self) -> None:
        """Check the fields against each other, and fill in `mock`, `split` and `split_matrix`."""
        self._check_ranges()
        self._check_cache_options()
        self._check_stages()
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
            return
        if self.blend is not None:
            _check_blend("blend", self.blend)
            if self.split is None:
                msg = "split must be given with blend, found None"
                raise ArgumentError(msg)
        else:
            self.mock = True
            self.split = "1,1,1"
        if self.multiple_validation_sets:
            msg = "multiple_validation_sets needs blend_per_split, found none"
            raise ArgumentError(msg)
        self.split_matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split or ""))

    def _check_ranges(self) -> None:
        for name, start, stop, words in (
            ("random_seed", 0, 2**32, "in [0, 2**32)"),
            ("sequence_length", 1, 2**63, "at least 1"),
            ("num_dataset_builder_threads", 1, 2**31, "at least 1"),
            ("shuffle_block", 1, 2**63, "at least 1"),
            ("shuffle_window", 1, 2**63, "at least 1"),
        ):
            value = getattr(self, name)
            if not (is_integer(value) and start <= value < stop):
                msg = f"{name} must be a whole number {words}, found {value!r}"
                raise ArgumentError(msg)
            setattr(self, name, index(value))  # one of NumPy's is no JSON, of which names of files are made
        if not self.mid_level_dataset_surplus >= 0:
            msg = f"mid_level_dataset_surplus must be at least 0, found {self.mid_level_dataset_surplus}"
            raise ArgumentError(msg)
        if self.order not in ORDERS:
            msg = f"order must be one of {', '.join(map(repr, ORDERS))}, found {self.order!r}"
            raise ArgumentError(msg)
        if self.order != "megatron" and self.renormalize_blend_weights is not None:
            msg = f"renormalize_blend_weights is a rule of order='megatron', found order={self.order!r}"
            raise ArgumentError(msg)
        for name, default in _INSTANT_ONLY.items():
            if self.order != "instant" and getattr(self, name) != default:
                msg = f"{name} needs order='instant', found {self.order!r}"
                raise ArgumentError(msg)

    def _check_stages(self) -> None:
        blend = self.blend if self.blend is not None else (self.blend_per_split or [None])[Split.train.value]
        for name in ("blend_stages", "blend_max_epochs"):
            if getattr(self, name) is not None and (blend is None or len(blend[0]) < 2):
                msg = f"{name} needs a training blend of several datasets, found {blend}"
                raise ArgumentError(msg)

    def _check_cache_options(self) -> None:
        cache = self.path_to_cache
        if cache is not None and (not isinstance(cache, (str, os.PathLike)) or "\0" in str(cache)):
            msg = f"path_to_cache must be the path of a folder or None, found {cache!r}"
            raise ArgumentError(msg)
        for option in ("fast_cache_load", "defer_npy_index_mmap"):
            if getattr(self, option) and self.order == "instant":
                msg = f"{option} must be False with order='instant', which has no indices to load, found True"
                raise ArgumentError(msg)
            if getattr(self, option) and self.path_to_cache is None:
                msg = f"{option} needs path_to_cache, found None"
                raise ArgumentError(msg)
        if self.fast_cache_load and self.blend is not None:
            msg = "fast_cache_load needs blend_per_split, found blend"
            raise ArgumentError(msg)

    def _check_blend_per_split(self, blends: Sequence[Blend | None]) -> None:
        for option in ("blend", "split"):
            if getattr(self, option) is not None:
                msg = f"{option} must be None with blend_per_split, found {getattr(self, option)!r}"
                raise ArgumentError(msg)
        if len(blends) != len(Split):
            msg = f"blend_per_split must have {len(Split)} entries, found {len(blends)}"
            raise ArgumentError(msg)
        for split, blend in zip(Split, blends, strict=True):
            if blend is not None:
                _check_blend(f"blend_per_split[{split.name}]", blend)


def _is_weight(value: Any) -> bool:
    """True for a number that is finite, in doubles, and at least 0."""
    try:
        return not isinstance(value, (str, bytes)) and 0 <= float(value) < float("inf")
    except (TypeError, ValueError, OverflowError):
        return False


def _check_blend(name: str, blend: Blend) -> None:
    if isinstance(blend, str) or len(blend) != 2 or isinstance(blend[0], str):
        msg = f"{name} must be a list of prefixes, and a list of weights or None, found {blend!r}"
        raise ArgumentError(msg)
    prefixes, weights = blend
    if not all(isinstance(prefix, str) for prefix in prefixes):
        msg = f"{name} must name prefixes as text, found {prefixes!r}"
        raise ArgumentError(msg)
    if len(prefixes) == 0:
        msg = f"{name} must name at least one prefix, found none"
        raise ArgumentError(msg)
    if weights is not None and len(weights) != len(prefixes):
        msg = f"{name} must have as many weights as prefixes, found {len(weights)} and {len(prefixes)}"
        raise ArgumentError(msg)
    if weights is not None and not (all(map(_is_weight, weights)) and any(weights)):
        msg = f"{name} must have finite weights of at least 0 that are not all 0, found {weights}"
        raise ArgumentError(msg)
