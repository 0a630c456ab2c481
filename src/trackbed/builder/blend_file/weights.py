"""From what a blend file wants of each dataset to the weights of a blend. Pure arithmetic.

Shapes: K datasets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trackbed.builder.blend_file.sizes import samples_for
from trackbed.builder.sizes import MOST_SAMPLES
from trackbed.errors import PlanError

__all__ = ["Wanted", "plan_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of one dataset of a split."""

    measure: Literal["weight", "ratio", "epochs"] | None
    amount: float
    tokens: int
    """Tokens of the whole dataset: what weights are divided by, and ratios multiplied with."""
    split_tokens: int
    """Tokens of its part in the split: what epochs are of."""
    part: float = 1.0
    """Which part of the amount is this dataset's, where it is one of a glob's."""


def plan_weights(
    wanted: Sequence[Wanted], *, size: int | None, sequence_length: int
) -> tuple[list[float] | None, int | None]:
    """The weights that give every dataset what is wanted of it, and the size of the blend.

    A weight is a share of the samples; a ratio a share of the samples for each token. Epochs are served first: what
    they leave of the size is shared out by the weights or ratios of the others.

    Args:
        wanted: `[K]` at least one; a measure for all or for none.
        size: samples of the blend; None where all datasets say their epochs, from which it follows.
        sequence_length: tokens of a sample, at least 1.

    Returns:
        `[K]` weights whose proportions count, or None to take all samples of every dataset once; and the size.

    Raises:
        PlanError: there are no tokens to weigh, or epochs leave nothing of the size to the others.

    >>> web, code = (
    ...     Wanted(measure=measure, amount=amount, tokens=800, split_tokens=800)
    ...     for measure, amount in (("weight", 3.0), ("epochs", 2.0))
    ... )
    >>> plan_weights([web, code], size=400, sequence_length=8)
    ([200.0, 200.0], 400)
    """
    measures = {one.measure for one in wanted}
    if measures == {None}:
        return None, size
    if "epochs" not in measures:
        return _checked([_plain_weight(one) for one in wanted]), size
    samples = [one.amount * one.split_tokens / sequence_length if one.measure == "epochs" else 0.0 for one in wanted]
    if not sum(samples) < MOST_SAMPLES:
        msg = f"datasets must give fewer than 2**62 samples by their epochs, found {sum(samples):g}"
        raise PlanError(msg)
    if measures == {"epochs"}:
        return _checked(samples), int(sum(samples)) if size is None else size
    left = (size or 0) - sum(samples)
    if left <= 0:
        needed = samples_for(int(sum(samples) * sequence_length), sequence_length)
        msg = (
            f"datasets with epochs must leave samples to the others, found that they need {needed:,} "
            f"of {size or 0:,}: short by {needed - (size or 0) + 1:,}"
        )
        raise PlanError(msg)
    others = [0.0 if one.measure == "epochs" else _plain_weight(one) for one in wanted]
    _checked(others)
    total = sum(others)
    return [mine + other * left / total for mine, other in zip(samples, others, strict=True)], size


def _plain_weight(one: Wanted) -> float:
    """Its weight as it was given, untouched: Megatron Core names indices by it."""
    if one.measure == "ratio":
        return one.amount * one.tokens
    return one.amount if one.part == 1.0 else one.amount * one.part


def _checked(weights: list[float]) -> list[float]:
    if not any(weights):
        msg = f"datasets must have tokens or weights to be drawn by, found {len(weights)} with neither"
        raise PlanError(msg)
    if not math.isfinite(sum(weights)):
        msg = f"weights must have a finite sum, found that {len(weights)} of up to {max(weights):g} have none"
        raise PlanError(msg)
    return weights
