"""Datasets and sizes of a split, as its configuration decides them. Pure arithmetic, in Python's doubles.

Shapes: K datasets of a split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trackbed.datasets.config import Blend, BlendedMegatronDatasetConfig
from trackbed.errors import ArgumentError
from trackbed.index.splits import Bounds, Split, normalize
from trackbed.kernels.integers import is_integer

_SURPLUS_0_10: Final = 1.005
MOST_SAMPLES: Final = 2**62
"""A larger size, rounded up and with a surplus, would not fit a 64-bit integer."""


@dataclass(frozen=True, slots=True)
class SplitSpec:
    """Datasets and sizes of one split."""

    split: Split
    prefixes: Sequence[str | None]
    """`[K]` prefixes of the low-level datasets; None for mock data."""
    bounds: Bounds
    """The part of each low-level dataset that belongs to the split."""
    requested: Sequence[int | None]
    """`[K]` samples that each dataset must be able to give; None for one epoch."""
    size: int | None
    """Samples of the split, at least as many as were requested; None for all samples of its datasets."""
    is_blended: bool = False
    """False if the datasets are used as they are."""
    weights: Sequence[float] | None = None
    """`[K]` shares that the blend draws by; None if it takes the datasets whole."""


def plan_split(split: Split, size: int | None, config: BlendedMegatronDatasetConfig) -> SplitSpec | None:
    """Plans one split by the rules of Megatron Core's builder. Reads no data.

    Args:
        split: the split.
        size: samples requested, None for one epoch; `check_sizes` has passed it.
        config: configuration of the builder.

    Returns:
        Its datasets and sizes; None for a split without data.

    >>> config = BlendedMegatronDatasetConfig(1234, 8, blend=(["a", "b"], [1, 3]), split="9,1,0")
    >>> spec = plan_split(Split.train, 1000, config)
    >>> spec.prefixes, spec.bounds, spec.requested, spec.weights, spec.size
    (['a', 'b'], (0, 0.9), [252, 754], [0.25, 0.75], 1000)
    >>> plan_split(Split.test, 10, config) is None
    True
    """
    bounds = config.split_matrix[split.value] if config.split_matrix is not None else None
    if config.mock:
        return None if bounds is None else SplitSpec(split, [None], bounds, [size], size)
    blend = blend_of(split, config)
    if blend is None:
        return None
    prefixes, weights = blend
    is_shared, count = config.blend is not None, len(prefixes)
    part = bounds if is_shared and bounds is not None else (0.0, 1.0)
    is_apart = split is Split.valid and config.multiple_validation_sets
    if (count == 1 and (weights is None or not is_shared)) or (is_apart and not is_shared):
        return SplitSpec(split, prefixes, part, [size] * count, size)
    if weights is None:
        return SplitSpec(split, prefixes, part, [None] * count, size, is_blended=True)
    size, drawn, per_dataset = plan_shares(normalize(weights), size or 0, config)
    return SplitSpec(split, prefixes, part, per_dataset, size, is_blended=True, weights=drawn)


def plan_shares(
    weights: Sequence[float], size: int, config: BlendedMegatronDatasetConfig
) -> tuple[int, list[float], list[int]]:
    """Plans a blend of at least `size` samples.

    Args:
        weights: `[K]` shares that add up to 1.
        size: samples asked for, at least 0.
        config: gives the surplus, or the rules of megatron-core 0.10.

    Returns:
        Samples of the blend, `[K]` shares to draw by, and `[K]` samples that each dataset must be able to give.
    """
    if config.renormalize_blend_weights is not None:
        counts = [math.ceil(size * weight * _SURPLUS_0_10) for weight in weights]
        total = sum(counts)
        renormalized = config.renormalize_blend_weights and total > 0
        drawn = [count / total for count in counts] if renormalized else list(weights)
        return total, drawn, counts
    counts = [math.ceil(size * weight) for weight in weights]
    surplus = 1 + config.mid_level_dataset_surplus
    if not max(counts, default=0) * surplus < MOST_SAMPLES:
        raise ArgumentError(
            f"mid_level_dataset_surplus must leave fewer than 2**62 samples for a dataset, found {surplus - 1:g}"
        )
    return sum(counts), list(weights), [math.ceil(count * surplus) for count in counts]


def check_sizes(sizes: Sequence[int | None], config: BlendedMegatronDatasetConfig) -> None:
    """Checks sizes against the configuration.

    Raises:
        ArgumentError: not one size per split, one outside `[0, 2**62)`, None for a blend with weights, or a number
            for a validation that is to be full.
    """
    if len(sizes) != len(Split):
        raise ArgumentError(f"sizes must have {len(Split)} entries, found {len(sizes)}")
    for split, size in zip(Split, sizes, strict=True):
        if size is not None and (not is_integer(size) or size < 0):
            raise ArgumentError(
                f"the size of split {split.name} must be a whole number of at least 0, or None, found {size!r}"
            )
        if size is not None and size >= MOST_SAMPLES:
            raise ArgumentError(f"the size of split {split.name} must be below 2**62 samples, found {size:,}")
        blend = blend_of(split, config)
        if size is None and blend is not None and blend[1] is not None:
            raise ArgumentError(
                f"the size of split {split.name} must be a number for a blend with weights, found None; "
                "leave the weights out to take all samples of its datasets"
            )
    if config.full_validation and sizes[Split.valid.value] is not None:
        raise ArgumentError(f"full_validation needs a size of None for split valid, found {sizes[Split.valid.value]}")


def blend_of(split: Split, config: BlendedMegatronDatasetConfig) -> Blend | None:
    """Returns the blend of a split; None for mock data, and for a split that is left out."""
    if config.mock:
        return None
    if config.blend is not None:
        used = config.split_matrix is not None and config.split_matrix[split.value] is not None
        return config.blend if used else None
    return config.blend_per_split[split.value] if config.blend_per_split else None
