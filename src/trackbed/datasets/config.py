"""Configuration shared by all dataset classes."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Final, Literal, get_args

from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address, parse_address, redact
from trackbed.index.splits import (
    Bounds,
    Split,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from trackbed.kernels.integers import is_integer
from trackbed.tokens import ObjectStorageConfig

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
"""Prefixes, and their weights or None."""

Stage = tuple[int, Sequence[float]] | tuple[int, Sequence[float], int]
"""First sample of a stage, the weights from there on, and the samples of a ramp to these, 0 if not given."""

_INSTANT_ONLY: Final = {
    "blend_stages": None,
    "blend_max_epochs": None,
    "blend_when_exhausted": "raise",
    "shuffle_block": 1,
    "shuffle_window": 1,
}

OrderName = Literal["megatron", "balanced", "instant", "packed"]
"""Order of the samples."""

ORDERS: Final[tuple[OrderName, ...]] = get_args(OrderName)

COMPUTED: Final = ("instant", "packed")
"""Orders without an index: samples are computed on each access."""


@dataclass
class BlendedMegatronDatasetConfig:
    """Configuration with the fields, their order and the defaults of megatron-core 0.16.1, then Trackbed's keywords.

    Raises:
        ArgumentError: fields that contradict each other or are out of range.
    """

    random_seed: int
    """Seed of every shuffle, in `[0, 2**32)`."""

    sequence_length: int
    """Tokens from one sample's start to the next, at least 1."""

    blend: Blend | None = None
    """Prefixes and weights of one blend, divided by `split`. Weights None: in proportion to the datasets' lengths."""

    blend_per_split: list[Blend | None] | None = None
    """One blend, or None, for each of training, validation and test; excludes `blend` and `split`."""

    multiple_validation_sets: bool | None = None
    """True to return the datasets of the validation blend in a list, not blended; needs `blend_per_split`."""

    full_validation: bool | None = None
    """True to validate on one epoch of each dataset: the requested size must be None."""

    split: str | None = None
    """Shares of training, validation and test, such as "99,1,0"; needed with `blend`."""

    split_matrix: list[Bounds | None] | None = field(init=False, default=None)
    """Begin and end of each share, computed from `split`."""

    num_dataset_builder_threads: int = 1
    """Threads that build datasets of a blend, at least 1."""

    path_to_cache: str | None = None
    """Folder of the indices. None: `<prefix>/cache/<class>_indices` for datasets, and memory for blends."""

    mmap_bin_files: bool = True
    """True to map `.bin` files; False to read each piece from the file."""

    mock: bool = field(init=False, default=False)
    """True for mock data: neither `blend` nor `blend_per_split` is given."""

    tokenizer: Any | None = None
    """An object with `eod`, `pad`, `vocab_size` and `unique_identifiers`."""

    mid_level_dataset_surplus: float = 0.005
    """Samples built per dataset of a blend beyond its share, as a fraction of it, at least 0."""

    allow_ambiguous_pad_tokens: bool | None = False
    """True to mask out the padding id even if it is also the id of another special token."""

    fast_cache_load: bool = False
    """True to open indices without building any: all of them must be in `path_to_cache`."""

    defer_npy_index_mmap: bool = False
    """True to open indices on first access to a sample: all of them must be in `path_to_cache`."""

    order: OrderName = field(default="megatron", kw_only=True)
    """Order of the samples. "megatron": Megatron Core's order, bit for bit. "balanced": a blend in exact proportions,
    shuffled as a whole. "instant": no index is built, and samples are shuffled instead of documents. "packed": as
    "instant", but a sample is a pack of whole documents, and not a stretch of the file."""

    blend_stages: Sequence[Stage] | None = field(default=None, kw_only=True)
    """First sample and `[K]` weights of each stage of the training blend, with `order="instant"`, and the samples of a
    ramp, if it has one. The weights replace those of the blend from that sample on; on a ramp, the shares change
    linearly from those before it. None for a blend without stages."""

    blend_max_epochs: Sequence[float | None] | None = field(default=None, kw_only=True)
    """`[K]` most epochs of each dataset in the training blend, with `order="instant"`; None for no limit."""

    blend_when_exhausted: Literal["raise", "reweight"] = field(default="raise", kw_only=True)
    """Behaviour when a dataset reaches its limit of epochs. "raise": an error at construction. "reweight": the blend
    goes on without the dataset, and a warning names the first such sample."""

    shuffle_block: int = field(default=1, kw_only=True)
    """Consecutive samples in the file that `order="instant"` moves as one block, at least 1. Larger blocks give
    larger contiguous reads and a less thorough shuffle."""

    shuffle_window: int = field(default=1, kw_only=True)
    """Consecutive blocks whose samples are shuffled together, at least 1; has no effect with blocks of 1."""

    renormalize_blend_weights: bool | None = field(default=None, kw_only=True)
    """None: sizes and weights as in megatron-core 0.16.1. True or False: sizes, weights and names as in 0.10."""

    groups: Mapping[str, Sequence[str]] | None = field(default=None, kw_only=True)
    """Pairs by prefix of the blend, for prefixes that name a group of pairs. Their documents are concatenated as if the
    pairs were merged."""

    @property
    def is_computed(self) -> bool:
        """True for an order without an index: samples are computed on each access."""
        return self.order in COMPUTED

    def __post_init__(self) -> None:
        """Checks the fields, and sets `mock`, `split` and `split_matrix`."""
        self._check_ranges()
        self._check_cache_options()
        self._check_stages()
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
            return
        if self.blend is not None:
            _check_blend("blend", self.blend)
            if self.split is None:
                raise ArgumentError("split must be given with blend, found None")
        else:
            self.mock = True
            self.split = "1,1,1"
        if self.multiple_validation_sets:
            raise ArgumentError("multiple_validation_sets needs blend_per_split, found none")
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
                raise ArgumentError(f"{name} must be a whole number {words}, found {value!r}")
            setattr(self, name, index(value))  # a NumPy integer cannot be encoded as JSON
        if not self.mid_level_dataset_surplus >= 0:
            raise ArgumentError(f"mid_level_dataset_surplus must be at least 0, found {self.mid_level_dataset_surplus}")
        if self.order not in ORDERS:
            raise ArgumentError(f"order must be one of {', '.join(map(repr, ORDERS))}, found {self.order!r}")
        if self.order != "megatron" and self.renormalize_blend_weights is not None:
            raise ArgumentError(f"renormalize_blend_weights is a rule of order='megatron', found order={self.order!r}")
        for name, default in _INSTANT_ONLY.items():
            if self.order not in COMPUTED and getattr(self, name) != default:
                raise ArgumentError(f"{name} needs order='instant' or 'packed', found {self.order!r}")

    def _check_stages(self) -> None:
        blend = self.blend if self.blend is not None else (self.blend_per_split or [None])[Split.train.value]
        for name in ("blend_stages", "blend_max_epochs"):
            if getattr(self, name) is not None and (blend is None or len(blend[0]) < 2):
                raise ArgumentError(f"{name} needs a training blend of several datasets, found {blend}")
        for stage in self.blend_stages or ():
            if len(stage) not in (2, 3):
                raise ArgumentError(f"blend_stages must have a first sample, weights and perhaps a ramp, found {stage}")

    def _check_cache_options(self) -> None:
        cache = self.path_to_cache
        if cache is not None and (not isinstance(cache, (str, os.PathLike)) or "\0" in str(cache)):
            raise ArgumentError(f"path_to_cache must be the path of a folder or None, found {cache!r}")
        if cache is not None and is_address(cache):
            raise ArgumentError(f"path_to_cache must be a local or shared folder, found the address {redact(cache)}")
        for option in ("fast_cache_load", "defer_npy_index_mmap"):
            if getattr(self, option) and self.order in COMPUTED:
                raise ArgumentError(
                    f"{option} must be False with order={self.order!r}, which has no indices to load, found True"
                )
            if getattr(self, option) and self.path_to_cache is None:
                raise ArgumentError(f"{option} needs path_to_cache, found None")
        if self.fast_cache_load and self.blend is not None:
            raise ArgumentError("fast_cache_load needs blend_per_split, found blend")

    def _check_blend_per_split(self, blends: Sequence[Blend | None]) -> None:
        for option in ("blend", "split"):
            if getattr(self, option) is not None:
                raise ArgumentError(f"{option} must be None with blend_per_split, found {getattr(self, option)!r}")
        if len(blends) != len(Split):
            raise ArgumentError(f"blend_per_split must have {len(Split)} entries, found {len(blends)}")
        for split, blend in zip(Split, blends, strict=True):
            if blend is not None:
                _check_blend(f"blend_per_split[{split.name}]", blend)


def _is_weight(value: Any) -> bool:
    """True if the value is a number that is finite as a double, and at least 0."""
    try:
        return not isinstance(value, (str, bytes)) and 0 <= float(value) < float("inf")
    except (TypeError, ValueError, OverflowError):
        return False


def _check_blend(name: str, blend: Blend) -> None:
    if isinstance(blend, str) or len(blend) != 2 or isinstance(blend[0], str):
        raise ArgumentError(f"{name} must be a list of prefixes, and a list of weights or None, found {blend!r}")
    prefixes, weights = blend
    if not all(isinstance(prefix, str) for prefix in prefixes):
        raise ArgumentError(f"{name} must name prefixes as text, found {prefixes!r}")
    if len(prefixes) == 0:
        raise ArgumentError(f"{name} must name at least one prefix, found none")
    if weights is not None and len(weights) != len(prefixes):
        raise ArgumentError(f"{name} must have as many weights as prefixes, found {len(weights)} and {len(prefixes)}")
    if weights is not None and not (all(map(_is_weight, weights)) and any(weights)):
        raise ArgumentError(f"{name} must have finite weights of at least 0 that are not all 0, found {weights}")


_NAMES = ("object_storage_cache_path", "s3_cache_path")


def storage_of(config: BlendedMegatronDatasetConfig) -> ObjectStorageConfig | None:
    """Returns the options of a configuration for pairs in object stores; None if it has none.

    Raises:
        ArgumentError: its two names of the folder have two values, or one that is no folder.
    """
    given = {name: getattr(config, name, None) for name in _NAMES}
    folders = [folder for folder in given.values() if folder]
    if len(set(folders)) > 1:
        found = " and ".join(repr(folder) for folder in folders)
        raise ArgumentError(f"object_storage_cache_path and s3_cache_path are two names of one option, found {found}")
    return ObjectStorageConfig(folders[0]) if folders else None


def check_stored(prefix: str, config: BlendedMegatronDatasetConfig) -> None:
    """Checks that a configuration fits a prefix, if that is an address."""
    if is_address(prefix):
        parse_address(prefix)  # refuses secrets without repeating them
    if is_address(prefix) and config.path_to_cache is None and config.order not in COMPUTED:
        raise ArgumentError(
            f"{prefix}: path_to_cache must be a folder for a pair in an object store, found None (or order='instant')"
        )
