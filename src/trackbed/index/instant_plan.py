"""Validation of the arguments of an instant order, and the data it precomputes from them.

Shapes: K datasets, N positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.index.interleaving import Weight
from trackbed.index.split_mix import split_mix, split_mix_words
from trackbed.index.stages import BlendStage, StagePlan, WhenExhausted, plan_stages
from trackbed.kernels import EpochShuffles
from trackbed.kernels.integers import is_integer

LAST_POSITION: Final = int(np.iinfo(np.int64).max)
_PHASES, _EPOCHS = range(2)  # word numbers in the seed's stream; the words seed the streams of phases and epoch keys


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InstantPlan:
    """Precomputed data from which `InstantOrder` locates positions."""

    num_samples: int
    """Length of the order."""
    is_limited: bool
    """True if epochs are limited; positions beyond the length are then undefined."""
    stages: StagePlan
    shuffles: EpochShuffles


def plan_instant(
    *,
    sizes: Sequence[int] | npt.NDArray[np.integer[Any]],
    stages: Sequence[BlendStage],
    seed: int,
    num_samples: int | None,
    max_epochs: Sequence[Weight | None] | None,
    when_exhausted: WhenExhausted,
    block: int,
    window: int,
) -> InstantPlan:
    """Checks the arguments of `InstantOrder` and plans its stages."""
    if not (is_integer(seed) and 0 <= seed < 2**64):
        raise ArgumentError(f"seed must be a whole number in [0, 2**64), found {seed!r}")
    seed = index(seed)
    length = LAST_POSITION if num_samples is None else index(num_samples)
    if not 0 <= length <= LAST_POSITION:
        raise ArgumentError(f"num_samples must be in [0, 2**63), found {num_samples}")
    if when_exhausted not in get_args(WhenExhausted):
        raise ArgumentError(
            f"when_exhausted must be one of {', '.join(get_args(WhenExhausted))}, found {when_exhausted!r}"
        )
    given = _checked_sizes(sizes)
    _check_stages(stages, given)
    return InstantPlan(
        num_samples=length,
        is_limited=max_epochs is not None,
        stages=plan_stages(
            stages,
            phase_key=split_mix(seed, _PHASES),
            limits=_limits(given, [None] * len(given) if max_epochs is None else max_epochs),
            num_samples=length,
            when_exhausted=when_exhausted,
        ),
        shuffles=EpochShuffles(
            sizes=np.maximum(given, 1),  # an empty dataset is never drawn
            keys=split_mix_words(split_mix(seed, _EPOCHS), len(given)),
            block=block,
            window=window,
        ),
    )


def checked_positions(positions: Sequence[int] | npt.NDArray[np.integer[Any]], *, stop: int) -> npt.NDArray[np.int64]:
    """`[N]` positions as a contiguous int64 vector, as the kernels require.

    Raises:
        ArgumentError: `positions` is not a vector of integers in `[0, stop)`.
    """
    given = np.asarray(positions)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise ArgumentError(
            f"positions must be a vector of integers, found dtype {given.dtype} and shape {list(given.shape)}"
        )
    if len(given) and not (int(given.min()) >= 0 and int(given.max()) < stop):
        raise ArgumentError(f"positions must be in [0, {stop}), found [{given.min()}, {given.max()}]")
    return np.require(given, dtype=np.int64, requirements=["C", "A"])


def _checked_sizes(sizes: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    given = np.asarray(sizes)
    if given.ndim != 1 or len(given) == 0 or given.dtype.kind not in "iu":
        raise ArgumentError(
            f"sizes must be a vector of at least one integer, found dtype {given.dtype}, shape {list(given.shape)}"
        )
    if not (int(given.min()) >= 0 and int(given.max()) <= LAST_POSITION):
        raise ArgumentError(f"sizes must be in [0, 2**63), found [{given.min()}, {given.max()}]")
    return given.astype(np.int64)


def _check_stages(stages: Sequence[BlendStage], sizes: npt.NDArray[np.int64]) -> None:
    if len(stages) == 0 or stages[0].first_sample != 0:
        raise ArgumentError(
            f"the first stage must begin at sample 0, found {[stage.first_sample for stage in stages][:10]}"
        )
    if stages[0].ramp:
        raise ArgumentError(f"the first stage has no weights before it: it must have ramp 0, found {stages[0].ramp}")
    before = 0
    for number, stage in enumerate(stages):
        if stage.first_sample < before:
            raise ArgumentError(
                f"stages must be in order, but stage {number} begins at {stage.first_sample} after {before}"
            )
        before = stage.first_sample
        if len(stage.weights) != len(sizes):
            raise ArgumentError(
                f"stage {number}: there must be one weight per size, {len(sizes)}, found {len(stage.weights)}"
            )
        for dataset in np.flatnonzero(sizes == 0).tolist():
            if stage.weights[dataset] > 0:
                raise ArgumentError(f"stage {number}: dataset {dataset} must have samples or weight 0, found neither")


def _limits(sizes: npt.NDArray[np.int64], max_epochs: Sequence[Weight | None]) -> npt.NDArray[np.int64]:
    """`[K]` maximum number of draws from each dataset, rounded because 0.7 as a double is a bit less than 7/10."""
    if len(max_epochs) != len(sizes):
        raise ArgumentError(f"max_epochs must have one entry per size, {len(sizes)}, found {len(max_epochs)}")
    limits = np.empty(len(sizes), dtype=np.int64)
    for dataset, (size, epochs) in enumerate(zip(sizes.tolist(), max_epochs, strict=True)):
        if epochs is None:
            limits[dataset] = LAST_POSITION
            continue
        epochs = epochs.item() if isinstance(epochs, np.generic) else epochs
        if not 0 <= epochs < math.inf:
            raise ArgumentError(
                f"max_epochs must be finite numbers of at least 0 or None, dataset {dataset} has {epochs}"
            )
        numerator, denominator = epochs.as_integer_ratio()
        limits[dataset] = min((2 * size * numerator + denominator) // (2 * denominator), LAST_POSITION)
    return limits
