"""Stages of a blend: the weights in effect from each sample on, and the datasets that run out.

Shapes: K datasets, T stages.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, PlanError
from trackbed.index.interleaving import Weight, integer_weights, interleaving
from trackbed.index.split_mix import split_mix
from trackbed.kernels import BlendTrees, interleaving_counts

WhenExhausted = Literal["raise", "reweight"]
"""Behaviour when a dataset reaches its limit of draws: raise an error at construction, or continue the blend without
it."""

_LAST_POSITION: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class BlendStage:
    """Weights of a blend from one sample on.

    Raises:
        ArgumentError: a field is out of range.
    """

    first_sample: int
    """First position of the stage, in `[0, 2**63)`; the stage ends where the next one begins."""
    weights: Sequence[Weight]
    """`[K]` finite numbers of at least 0, at least one of them above 0; only their proportions matter. A dataset of
    weight 0 is not drawn. Stored as a tuple."""

    def __post_init__(self) -> None:
        weights = tuple(weight.item() if isinstance(weight, np.generic) else weight for weight in self.weights)
        object.__setattr__(self, "first_sample", index(self.first_sample))
        object.__setattr__(self, "weights", weights)
        if not 0 <= self.first_sample <= _LAST_POSITION:
            raise ArgumentError(f"first_sample must be in [0, 2**63), found {self.first_sample}")
        for dataset, weight in enumerate(weights):
            if not 0 <= weight < math.inf:
                raise ArgumentError(f"weights must be finite numbers of at least 0, dataset {dataset} has {weight}")
        if not any(weights):
            raise ArgumentError(f"at least one weight must be above 0, found {len(weights)} weights of 0")


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """A dataset that reached its limit of draws, and without which the blend continues."""

    dataset: int
    sample: int
    """First position that is drawn without the dataset."""


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """Stages and trees that determine the dataset at each position and the number of its earlier draws."""

    stages: tuple[BlendStage, ...]
    """The requested stages, plus one for each position at which datasets run out."""
    exhaustions: tuple[Exhaustion, ...]
    trees: BlendTrees


def plan_stages(
    stages: Sequence[BlendStage],
    *,
    phase_key: int,
    limits: npt.NDArray[np.int64],
    num_samples: int,
    when_exhausted: WhenExhausted,
) -> StagePlan:
    """Builds the trees of all stages, each continuing the draw counts of the previous stages.

    Where datasets run out, an additional stage begins in which their weights are 0.

    Args:
        stages: `[T]` stages with equal numbers of weights. The first starts at sample 0, and no stage starts before
            its predecessor.
        phase_key: seed of the stream of the stages' phase keys, in `[0, 2**64)`.
        limits: `[K]` maximum number of draws from each dataset, at least 0.
        num_samples: number of samples to which the limits apply, in `[0, 2**63)`.
        when_exhausted: behaviour when a dataset runs out.
    """
    drawn = np.zeros(len(limits), dtype=np.int64)
    laid: list[tuple[BlendStage, BlendTrees]] = []
    exhaustions: list[Exhaustion] = []
    pending = deque(stages)
    while pending:
        stage = pending.popleft()
        stop = pending[0].first_sample if pending else _LAST_POSITION
        num_limited = max(0, min(stop, num_samples) - stage.first_sample)
        if when_exhausted == "reweight" and num_limited > 0:
            stage, gone = _leave_out(stage, drawn >= limits, known={each.dataset for each in exhaustions})
            exhaustions += gone
        tree = _stage_tree(stage, drawn, phase_key)
        laid.append((stage, tree))
        excess = _first_excess(tree, limits, num_limited)
        if excess is not None:
            stop = stage.first_sample + excess
            if when_exhausted == "raise":
                dataset = int((interleaving_counts(tree, excess + 1) > limits).argmax())
                raise PlanError(
                    f"dataset {dataset} may be drawn at most {limits[dataset]} times, but runs out at sample {stop}"
                )
            pending.appendleft(BlendStage(stop, stage.weights))
        drawn = interleaving_counts(tree, stop - stage.first_sample)
    return StagePlan(stages=tuple(stage for stage, _ in laid), exhaustions=tuple(exhaustions), trees=_joined(laid))


def _stage_tree(stage: BlendStage, drawn: npt.NDArray[np.int64], phase_key: int) -> BlendTrees:
    """The tree of one stage, as if it were the only one.

    Phases depend on the first sample and not on the stage's number, so an empty stage does not affect the order.
    """
    nodes, root = interleaving(
        integer_weights(stage.weights), drawn=drawn, phase_key=split_mix(phase_key, stage.first_sample)
    )
    zero = np.zeros(1, dtype=np.int64)
    return BlendTrees(len(drawn), nodes, zero, zero, np.array([root], dtype=np.uint32))


def _joined(laid: Sequence[tuple[BlendStage, BlendTrees]]) -> BlendTrees:
    blocks = [tree.nodes for _, tree in laid]
    ends = np.cumsum([len(block) for block in blocks], dtype=np.int64)
    return BlendTrees(
        num_datasets=laid[0][1].num_datasets,
        nodes=np.concatenate(blocks),
        first_samples=np.array([stage.first_sample for stage, _ in laid], dtype=np.int64),
        first_nodes=np.concatenate([[0], ends[:-1]]).astype(np.int64),
        roots=np.concatenate([tree.roots for _, tree in laid]),
    )


def _first_excess(tree: BlendTrees, limits: npt.NDArray[np.int64], num_samples: int) -> int | None:
    """First sample of a stage that exceeds a dataset's limit, or None. Found by bisection, as counts never decrease."""

    def is_beyond(sample: int) -> bool:
        return bool((interleaving_counts(tree, sample + 1) > limits).any())

    if num_samples == 0 or not is_beyond(num_samples - 1):
        return None
    return bisect_left(range(num_samples), x=True, key=is_beyond)


def _leave_out(
    stage: BlendStage, exhausted: npt.NDArray[np.bool_], known: set[int]
) -> tuple[BlendStage, list[Exhaustion]]:
    """The stage with weight 0 for exhausted datasets, and the exhaustions that are not in `known`."""
    gone = [dataset for dataset in np.flatnonzero(exhausted).tolist() if stage.weights[dataset] > 0]
    weights = tuple(0 if dataset in gone else weight for dataset, weight in enumerate(stage.weights))
    if not any(weights):
        raise PlanError(
            f"at least one dataset must have samples left, but all have run out at sample {stage.first_sample}"
        )
    exhaustions = [Exhaustion(dataset, stage.first_sample) for dataset in gone if dataset not in known]
    return BlendStage(stage.first_sample, weights), exhaustions
