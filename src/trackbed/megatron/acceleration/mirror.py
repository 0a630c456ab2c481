"""Building what the cache of a Megatron Core's builder lacks, on all ranks, before it opens its datasets."""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.comm import SOLO
from trackbed.comm.torch_group import current_group
from trackbed.datasets import GPTDataset, GPTDatasetConfig
from trackbed.errors import ArgumentError
from trackbed.files import look_again_in
from trackbed.files.stores import is_address

logger = logging.getLogger(__name__)

_DECIDING: Final = (
    "random_seed",
    "sequence_length",
    "blend",
    "blend_per_split",
    "multiple_validation_sets",
    "full_validation",
    "split",
    "num_dataset_builder_threads",
    "path_to_cache",
    "mid_level_dataset_surplus",
    "drop_last_partial_validation_sequence",
    "add_extra_token_to_sequence",
)
"""Fields of Megatron's configuration that decide which indices there are, and what is in them."""
_OPENING_ONLY: Final = ("fast_cache_load", "defer_npy_index_mmap", "sequences_per_dataset")
"""Fields with which Megatron expects that the cache is whole."""

_Mirror = BlendedMegatronDatasetBuilder[GPTDataset]


@dataclass(frozen=True, slots=True)
class _TokenizerIdentity:
    """All of a tokenizer that decides an index: what its description says."""

    unique_identifiers: "OrderedDict[str, Any]"
    vocab_size: None = None


def build_missing(builder: Any) -> None:
    """Collective over all ranks of `torch.distributed`: builds the indices that the cache of a builder lacks.

    Also ranks that want no datasets build their part. Nothing is built unless all ranks have a configuration that
    Trackbed's builder has a counterpart of.

    Args:
        builder: Megatron Core's builder.

    Raises:
        TrackbedError: an index cannot be built; among several ranks a CollectiveError on all of them.
    """
    group = current_group() or SOLO
    with group.guarded("comparing the builders of the ranks"):
        mirror = _mirror_of(builder)
        found = group.all_gather(mirror if isinstance(mirror, str) else "")
    reason = next(filter(None, found), "")
    if reason or isinstance(mirror, str):
        logger.info("megatron.core builds its indices alone: %s", reason)
        return
    mirror.build()
    # Hosts remember for a while that a file was not there, and then Megatron would build it again.
    look_again_in(str(mirror.config.path_to_cache))


def _mirror_of(builder: Any) -> _Mirror | str:
    """Returns the builder that makes the same files, or in words why there is none."""
    reason = _difference(builder)
    if reason:
        return reason
    config = builder.config
    identity = getattr(config.tokenizer, "unique_identifiers", None)
    if identity is None:
        return f"tokenizer must have unique_identifiers, found a {type(config.tokenizer).__name__}"
    try:
        mirrored = GPTDatasetConfig(
            **{name: getattr(config, name) for name in _DECIDING},
            tokenizer=_TokenizerIdentity(identity),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        mirror = _Mirror(GPTDataset, builder.sizes, lambda: True, mirrored)
    except ArgumentError as error:
        return str(error)
    if mirrored.split_matrix != config.split_matrix:
        return f"split_matrix must follow from split, {mirrored.split_matrix}, found {config.split_matrix}"
    return mirror


def _difference(builder: Any) -> str:
    """Returns what makes the indices of a builder others than Trackbed's; empty if nothing does."""
    classes = import_module("megatron.core.datasets.gpt_dataset")
    own = import_module("megatron.core.datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    config = builder.config
    pairs = (
        ("the builder", type(builder), own),
        ("the class of the datasets", builder.cls, classes.GPTDataset),
        ("the configuration", type(config), classes.GPTDatasetConfig),
    )
    for what, found, wanted in pairs:
        if found is not wanted:
            return f"{what} must be {wanted.__name__}, found {getattr(found, '__name__', found)}"
    if config.mock or not config.path_to_cache:
        return f"a blend and path_to_cache must be given, found {'mock data' if config.mock else config.path_to_cache}"
    for name in _OPENING_ONLY:
        if getattr(config, name):
            return f"{name} must not be set where indices are built, found it set"
    stored = next(filter(_is_stored, _prefixes(config)), None)
    return "" if stored is None else f"pairs must be files, found {stored}"


def _prefixes(config: Any) -> Iterator[Any]:
    for blend in (config.blend, *(config.blend_per_split or ())):
        yield from () if blend is None else blend[0]


def _is_stored(prefix: Any) -> bool:
    return isinstance(prefix, str) and is_address(prefix)
