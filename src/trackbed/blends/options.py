"""Fields of `GPTDatasetConfig` that `[options]` of a blend file may set, each with its rule."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trackbed.blends.toml_tables import FLAG, NUMBER, TEXT, WHOLE, WHOLE_POSITIVE, Rule, TableReader, one_of

__all__ = ["OPTIONS", "read_options"]

logger = logging.getLogger(__name__)

OPTIONS: Final[Mapping[str, Rule]] = {
    "add_extra_token_to_sequence": FLAG,
    "allow_ambiguous_pad_tokens": FLAG,
    "blend_when_exhausted": one_of(["raise", "reweight"]),
    "context_parallel_size": WHOLE_POSITIVE,
    "create_attention_mask": FLAG,
    "create_cu_seqlens": FLAG,
    "data_parallel_size": WHOLE_POSITIVE,
    "defer_npy_index_mmap": FLAG,
    "drop_last_partial_validation_sequence": FLAG,
    "eod_mask_loss": FLAG,
    "fast_cache_load": FLAG,
    "full_validation": FLAG,
    "mid_level_dataset_surplus": NUMBER,
    "mmap_bin_files": FLAG,
    "multiple_validation_sets": FLAG,
    "num_dataset_builder_threads": WHOLE_POSITIVE,
    "object_storage_cache_path": TEXT,
    "renormalize_blend_weights": FLAG,
    "reset_attention_mask": FLAG,
    "reset_position_ids": FLAG,
    "sequence_parallel_size": WHOLE,
    "shuffle_block": WHOLE_POSITIVE,
    "shuffle_window": WHOLE_POSITIVE,
}
_IDX_CACHE: Final = "object_storage_cache_path"
_REQUIRED: Final = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")
"""Fields without a default in Megatron Core; False by default in a blend file."""
_MASK: Final = "create_attention_mask"
"""True by default in Megatron Core; False in a blend file, as attention kernels make causal masks themselves."""


def read_options(table: TableReader, folder: Path) -> dict[str, Any]:
    """Reads the given options, and adds those that a configuration requires.

    Args:
        table: the table.
        folder: folder that paths are relative to.
    """
    given = {name: table.take(name, rule) for name, rule in OPTIONS.items()}
    table.refuse_unknown()
    if given[_IDX_CACHE] is not None:
        given[_IDX_CACHE] = str(folder / given[_IDX_CACHE])
    if given["reset_attention_mask"] and not given[_MASK]:
        logger.warning("options.reset_attention_mask has no effect without create_attention_mask = true")
    return {
        **dict.fromkeys((*_REQUIRED, _MASK), False),
        **{name: value for name, value in given.items() if value is not None},
    }
