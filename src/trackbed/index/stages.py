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
    ramp: int = 0
    """Samples within which the shares change linearly, from those before the stage to those of `weights`; 0 for at
    once. A stage that begins before the ramp's end goes on from the shares of that sample."""

    def __post_init__(self) -> None:
        weights = tuple(weight.item() if isinstance(weight, np.generic) else weight for weight in self.weights)
        object.__setattr__(self, "first_sample", index(self.first_sample))
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "ramp", index(self.ramp))
        if not 0 <= self.first_sample <= _LAST_POSITION:
            raise ArgumentError(f"first_sample must be in [0, 2**63), found {self.first_sample}")
        if not 0 <= self.ramp <= _LAST_POSITION - self.first_sample:
            raise ArgumentError(f"ramp must be at least 0 and end below sample 2**63, found {self.ramp} samples")
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
    """The requested stages, plus one behind each ramp, and for each position at which datasets run out."""
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
        stages: `[T]` stages with equal numbers of weights. The first starts at sample 0, without a ramp, and no stage
            starts before its predecessor.
        phase_key: seed of the stream of the stages' phase keys, in `[0, 2**64)`.
        limits: `[K]` maximum number of draws from each dataset, at least 0.
        num_samples: number of samples to which the limits apply, in `[0, 2**63)`.
        when_exhausted: behaviour when a dataset runs out.
    """
    drawn = np.zeros(len(limits), dtype=np.int64)
    laid: list[_Laid] = []
    exhaustions: list[Exhaustion] = []
    pending = deque(stages)
    while pending:
        stage = pending.popleft()
        stop = pending[0].first_sample if pending else _LAST_POSITION
        before = laid[-1].shares_at(stage.first_sample) if stage.ramp else None
        if stage.ramp and stage.first_sample + stage.ramp < stop:
            stop = stage.first_sample + stage.ramp
            pending.appendleft(BlendStage(stop, stage.weights))
        num_limited = max(0, min(stop, num_samples) - stage.first_sample)
        if when_exhausted == "reweight" and num_limited > 0:
            stage, before, gone = _leave_out(stage, before, drawn >= limits, {each.dataset for each in exhaustions})
            exhaustions += gone
        tree = _stage_trees(stage, before, drawn, phase_key)
        laid.append(_Laid(stage, before, tree))
        excess = _first_excess(tree, limits, num_limited)
        if excess is not None:
            stop = stage.first_sample + excess
            if when_exhausted == "raise":
                dataset = int((interleaving_counts(tree, excess + 1) > limits).argmax())
                raise PlanError(
                    f"dataset {dataset} may be drawn at most {limits[dataset]} times, but runs out at sample {stop}"
                )
            pending.appendleft(BlendStage(stop, stage.weights, ramp=max(0, stage.ramp - excess)))
        drawn = interleaving_counts(tree, stop - stage.first_sample)
    return StagePlan(stages=tuple(each.stage for each in laid), exhaustions=tuple(exhaustions), trees=_joined(laid))


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """A stage, from which the next one begins."""

    stage: BlendStage
    before: tuple[Weight, ...] | None
    """`[K]` weights before a ramp; None for a stage of constant weights."""
    trees: BlendTrees
    """Those of this stage alone, whose first sample is 0."""

    def shares_at(self, sample: int) -> tuple[Weight, ...]:
        """`[K]` weights in the proportions that hold at a sample of the stage, or at its end."""
        if self.before is None:
            return tuple(self.stage.weights)
        first, last = integer_weights(self.before), integer_weights(self.stage.weights)
        done = sample - self.stage.first_sample
        to_first, to_last = sum(last) * (self.stage.ramp - done), sum(first) * done
        return tuple(a * to_first + b * to_last for a, b in zip(first, last, strict=True))


def _stage_trees(
    stage: BlendStage, before: tuple[Weight, ...] | None, drawn: npt.NDArray[np.int64], phase_key: int
) -> BlendTrees:
    """The tree of one stage as if it were the only one, or the two of a ramp.

    Phases depend on the first sample and not on the stage's number, so an empty stage does not affect the order.
    """
    blocks = [(stage.weights if before is None else before, drawn, stage.first_sample)]
    if before is not None:
        blocks.append((stage.weights, np.zeros_like(drawn), stage.first_sample + 2**63))
    made = [
        interleaving(integer_weights(weights), drawn=counts, phase_key=split_mix(phase_key, word))
        for weights, counts, word in blocks
    ]
    zeros = np.zeros(len(made), dtype=np.int64)
    return BlendTrees(
        num_datasets=len(drawn),
        nodes=np.concatenate([nodes for nodes, _ in made]),
        first_samples=zeros,
        first_nodes=np.cumsum([0, *[len(nodes) for nodes, _ in made[:-1]]], dtype=np.int64),
        roots=np.array([root for _, root in made], dtype=np.uint32),
        ramps=np.array([0, stage.ramp][: len(made)], dtype=np.int64),
    )


def _joined(laid: Sequence[_Laid]) -> BlendTrees:
    trees = [each.trees for each in laid]
    starts = np.cumsum([0, *[len(each.nodes) for each in trees[:-1]]], dtype=np.int64)
    return BlendTrees(
        num_datasets=trees[0].num_datasets,
        nodes=np.concatenate([each.nodes for each in trees]),
        first_samples=np.concatenate([each.trees.first_samples + each.stage.first_sample for each in laid]),
        first_nodes=np.concatenate([each.first_nodes + start for each, start in zip(trees, starts, strict=True)]),
        roots=np.concatenate([each.roots for each in trees]),
        ramps=np.concatenate([each.ramps for each in trees]),
    )


def _first_excess(tree: BlendTrees, limits: npt.NDArray[np.int64], num_samples: int) -> int | None:
    """First sample of a stage that exceeds a dataset's limit, or None. Found by bisection, as counts never decrease."""

    def is_beyond(sample: int) -> bool:
        return bool((interleaving_counts(tree, sample + 1) > limits).any())

    if num_samples == 0 or not is_beyond(num_samples - 1):
        return None
    return bisect_left(range(num_samples), x=True, key=is_beyond)


def _leave_out(
    stage: BlendStage, before: tuple[Weight, ...] | None, exhausted: npt.NDArray[np.bool_], known: set[int]
) -> tuple[BlendStage, tuple[Weight, ...] | None, list[Exhaustion]]:
    """The stage with weight 0 for exhausted datasets, and the exhaustions that are not in `known`.

    A ramp from datasets that are all exhausted becomes a stage of constant weights.
    """

    def is_drawn(dataset: int) -> bool:
        return stage.weights[dataset] > 0 or (before is not None and before[dataset] > 0)

    def without(weights: Sequence[Weight]) -> tuple[Weight, ...]:
        return tuple(0 if dataset in gone else weight for dataset, weight in enumerate(weights))

    gone = {dataset for dataset in np.flatnonzero(exhausted).tolist() if is_drawn(dataset)}
    weights = without(stage.weights)
    if not any(weights):
        raise PlanError(
            f"at least one dataset must have samples left, but all have run out at sample {stage.first_sample}"
        )
    exhaustions = [Exhaustion(dataset, stage.first_sample) for dataset in sorted(gone - known)]
    if before is not None and not any(before := without(before)):
        before = None
    return BlendStage(stage.first_sample, weights, 0 if before is None else stage.ramp), before, exhaustions
