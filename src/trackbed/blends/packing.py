"""Packs of the datasets of a blend file, from the lengths of their documents."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trackbed.blends.members import Member
from trackbed.index import Split
from trackbed.index.contiguous_packs import ContiguousPacks
from trackbed.index.packing import PackingSummary, Packs
from trackbed.kernels.packing import PackShape


def summarise_packs(
    member: Member, split: Split, options: Mapping[str, Any], *, sequence_length: int
) -> PackingSummary:
    """Packs the documents of a dataset in a split, and returns how full its packs are. Reads their lengths.

    Args:
        member: the dataset.
        split: the split.
        options: options of the file, of which those of packs count.
        sequence_length: S.

    Raises:
        ArgumentError: an option is out of range.
    """
    start, stop = member.split_ranges[split.value] or (0, 0)
    lengths = np.require(member.reopen().sequence_lengths[start:stop], dtype=np.int32, requirements=["C", "A"])
    shape = PackShape(sequence_length, options.get("pack_multiple") or 1, options.get("pack_long") or "split")
    if not member.entry.packed:
        return ContiguousPacks(lengths, shape).summary()
    most, window = options.get("pack_most_documents"), options.get("pack_window")
    return Packs(lengths, shape, most_documents=most, window=window).summary()
