"""Typed wrappers of the compiled kernels, which validate their arguments."""

from trackbed.kernels.blend import balanced_blend, exhaustive_blend, greedy_blend
from trackbed.kernels.gather import (
    BatchArrays,
    Extent,
    FetchedBytes,
    Gathered,
    SampleShape,
    SampleSources,
    Sentences,
    Visits,
    gather,
)
from trackbed.kernels.gather_masked import MaskedBatchArrays, MaskingTable, gather_masked
from trackbed.kernels.gather_packs import PackedBatchArrays, PackedShape, gather_packs
from trackbed.kernels.instant import BlendTrees, EpochShuffles, draw_phases, instant_locate, interleaving_counts
from trackbed.kernels.isa import available_levels, available_threads, compiler
from trackbed.kernels.least_loaded import assign_least_loaded
from trackbed.kernels.mapping import build_mapping
from trackbed.kernels.narrow import narrow
from trackbed.kernels.permutation import (
    PERMUTATION_VERSION,
    check_blocks,
    check_positions,
    check_size_and_key,
    find_position,
    permute,
    permute_blocks,
)
from trackbed.kernels.rank_sum import sum_ranks
from trackbed.kernels.samples import count_tokens, cut_pairs, pair_lengths, sample_index
from trackbed.kernels.shuffle import Twister, legacy_shuffle, new_twister
from trackbed.kernels.small_indices import SmallDataset, SmallIndices, small_indices
from trackbed.kernels.square_sum import square_sum

__all__ = [
    "PERMUTATION_VERSION",
    "BatchArrays",
    "BlendTrees",
    "EpochShuffles",
    "Extent",
    "FetchedBytes",
    "Gathered",
    "MaskedBatchArrays",
    "MaskingTable",
    "PackedBatchArrays",
    "PackedShape",
    "SampleShape",
    "SampleSources",
    "Sentences",
    "SmallDataset",
    "SmallIndices",
    "Twister",
    "Visits",
    "assign_least_loaded",
    "available_levels",
    "available_threads",
    "balanced_blend",
    "build_mapping",
    "check_blocks",
    "check_positions",
    "check_size_and_key",
    "compiler",
    "count_tokens",
    "cut_pairs",
    "draw_phases",
    "exhaustive_blend",
    "find_position",
    "gather",
    "gather_masked",
    "gather_packs",
    "greedy_blend",
    "instant_locate",
    "interleaving_counts",
    "legacy_shuffle",
    "narrow",
    "new_twister",
    "pair_lengths",
    "permute",
    "permute_blocks",
    "sample_index",
    "small_indices",
    "square_sum",
    "sum_ranks",
]
