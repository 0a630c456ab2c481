"""Weights of a blend from the amounts that a blend file requests of each dataset. Pure arithmetic.

Shapes: K datasets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trackbed.blends.sizes import samples_for
from trackbed.builder.plan_split import MOST_SAMPLES
from trackbed.errors import PlanError

_MOST_WRITTEN_OUT: Final = 1e24


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """Amount requested of one dataset in a split."""

    measure: Literal["weight", "ratio", "epochs"] | None
    amount: float
    tokens: int
    """Tokens of the whole dataset; ratios are multiplied by it."""
    split_tokens: int
    """Tokens of its part in the split; epochs are multiplied by it."""
    part: float = 1.0
    """Fraction of the amount for this dataset, if it is one of a glob."""


def plan_weights(
    requests: Sequence[DatasetRequest], *, size: int | None, sequence_length: int
) -> tuple[list[float] | None, int | None]:
    """Computes the weights that draw the requested amount from every dataset, and the size of the blend.

    A weight is a share of the samples; a ratio is a share of the samples per token. Epochs are served first: the rest
    of the size is divided by the weights or ratios of the other datasets.

    Args:
        requests: `[K]` requests, at least one; all have a measure, or none has.
        size: samples of the blend; None if all datasets give epochs, which determine it.
        sequence_length: tokens of a sample, at least 1.

    Returns:
        `[K]` weights, of which only the proportions matter, or None to take all samples of every dataset once; and the
        size.

    >>> web, code = (
    ...     DatasetRequest(measure=measure, amount=amount, tokens=800, split_tokens=800)
    ...     for measure, amount in (("weight", 3.0), ("epochs", 2.0))
    ... )
    >>> plan_weights([web, code], size=400, sequence_length=8)
    ([200.0, 200.0], 400)
    """
    measures = {one.measure for one in requests}
    if measures == {None}:
        return None, size
    if "epochs" not in measures:
        return _checked([_plain_weight(one) for one in requests]), size
    samples = [one.amount * one.split_tokens / sequence_length if one.measure == "epochs" else 0.0 for one in requests]
    if not sum(samples) < MOST_SAMPLES:
        raise PlanError(f"datasets must give fewer than 2**62 samples by their epochs, found {_whole(sum(samples))}")
    if measures == {"epochs"}:
        return _checked(samples), int(sum(samples)) if size is None else size
    left = (size or 0) - sum(samples)
    if left <= 0:
        needed = samples_for(int(sum(samples) * sequence_length), sequence_length)
        raise PlanError(
            f"datasets with epochs must leave samples to the others, found that they need {needed:,} "
            f"of {size or 0:,}: short by {needed - (size or 0) + 1:,}"
        )
    others = [0.0 if one.measure == "epochs" else _plain_weight(one) for one in requests]
    _checked(others)
    total = sum(others)
    return [mine + other * left / total for mine, other in zip(samples, others, strict=True)], size


def _plain_weight(one: DatasetRequest) -> float:
    """Returns the weight exactly as given, since Megatron Core's names of indices contain it."""
    if one.measure == "ratio":
        return one.amount * one.tokens
    return one.amount if one.part == 1.0 else one.amount * one.part


def _whole(number: float) -> str:
    """Formats a number of samples in whole, unless it has hundreds of digits.

    >>> _whole(5e18), _whole(1e300), _whole(math.inf)
    ('5,000,000,000,000,000,000', '1e+300', 'inf')
    """
    return f"{number:,.0f}" if number < _MOST_WRITTEN_OUT else f"{number:g}"


def _checked(weights: list[float]) -> list[float]:
    if not any(weights):
        raise PlanError(f"datasets must have tokens or weights to draw by, found {len(weights)} with neither")
    if not math.isfinite(sum(weights)):
        raise PlanError(
            f"weights must have a finite sum, found that {len(weights)} of up to {max(weights):g} have none"
        )
    return weights
