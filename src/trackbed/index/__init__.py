"""Sample orders as pure functions over arrays, independent of files, ranks and clocks."""

from trackbed.index.balanced import BALANCED_VERSION, balanced_blend, largest_remainders
from trackbed.index.blend import exhaustive_blend, greedy_blend
from trackbed.index.documents import document_index
from trackbed.index.epochs import EpochPlan, plan_epochs
from trackbed.index.instant import InstantOrder
from trackbed.index.legacy_random import LegacyShuffle, legacy_shuffle
from trackbed.index.order import Order
from trackbed.index.permutation import PERMUTATION_VERSION, BlockPermutation, Permutation
from trackbed.index.samples import sample_index
from trackbed.index.shuffle import shuffle_index
from trackbed.index.splits import (
    Split,
    convert_split_vector_to_split_matrix,
    get_blend_from_list,
    normalize,
    parse_and_normalize_split,
    split_range,
)
from trackbed.index.stages import BlendStage, Exhaustion

__all__ = [
    "BALANCED_VERSION",
    "PERMUTATION_VERSION",
    "BlendStage",
    "BlockPermutation",
    "EpochPlan",
    "Exhaustion",
    "InstantOrder",
    "LegacyShuffle",
    "Order",
    "Permutation",
    "Split",
    "balanced_blend",
    "convert_split_vector_to_split_matrix",
    "document_index",
    "exhaustive_blend",
    "get_blend_from_list",
    "greedy_blend",
    "largest_remainders",
    "legacy_shuffle",
    "normalize",
    "parse_and_normalize_split",
    "plan_epochs",
    "sample_index",
    "shuffle_index",
    "split_range",
]
