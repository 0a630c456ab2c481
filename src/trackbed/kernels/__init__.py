"""Typed wrappers of the compiled kernels, which validate their arguments."""

from trackbed.kernels.blend import balanced_blend, exhaustive_blend, greedy_blend
from trackbed.kernels.gather import BatchArrays, Extent, Gathered, SampleShape, SampleSources, Visits, gather
from trackbed.kernels.index_ends import RawIndexEnds, read_index_ends
from trackbed.kernels.instant import BlendTrees, EpochShuffles, draw_phases, instant_locate, interleaving_counts
from trackbed.kernels.isa import available_levels, available_threads
from trackbed.kernels.narrow import narrow
from trackbed.kernels.permutation import (
    PERMUTATION_VERSION,
    check_blocks,
    check_positions,
    check_size_and_key,
    permute,
    permute_blocks,
)
from trackbed.kernels.poll import Poll, poll_now, polling
from trackbed.kernels.samples import count_tokens, sample_index
from trackbed.kernels.shuffle import Twister, legacy_shuffle, new_twister
from trackbed.kernels.small_files import (
    FileSetFolders,
    file_stamps,
    joined_names,
    publish_file_sets,
    read_parts,
    stamps_and_changes,
    stamps_of_joined,
    write_files,
)
from trackbed.kernels.small_indices import SmallDataset, SmallIndices, small_indices

__all__ = [
    "PERMUTATION_VERSION",
    "BatchArrays",
    "BlendTrees",
    "EpochShuffles",
    "Extent",
    "FileSetFolders",
    "Gathered",
    "Poll",
    "RawIndexEnds",
    "SampleShape",
    "SampleSources",
    "SmallDataset",
    "SmallIndices",
    "Twister",
    "Visits",
    "available_levels",
    "available_threads",
    "balanced_blend",
    "check_blocks",
    "check_positions",
    "check_size_and_key",
    "count_tokens",
    "draw_phases",
    "exhaustive_blend",
    "file_stamps",
    "gather",
    "greedy_blend",
    "instant_locate",
    "interleaving_counts",
    "joined_names",
    "legacy_shuffle",
    "narrow",
    "new_twister",
    "permute",
    "permute_blocks",
    "poll_now",
    "polling",
    "publish_file_sets",
    "read_index_ends",
    "read_parts",
    "sample_index",
    "small_indices",
    "stamps_and_changes",
    "stamps_of_joined",
    "write_files",
]
