"""How often a dataset is read to give the samples asked for, and whether its last epoch stands apart.

Shapes: P tokens an epoch, E epochs, N samples asked for, R samples that come out.
"""

from dataclasses import dataclass

import numpy as np

from trackbed.errors import ArgumentError, PlanError

__all__ = ["EpochPlan", "plan_epochs", "samples_in", "stretches_per_epoch"]

_SEPARATE_BELOW = 0.80  # of an epoch's samples wanted from the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """What the three indices of a dataset are built from."""

    num_epochs: int
    num_samples: int
    """Samples that all epochs together give, at least as many as were asked for."""
    samples_before_last: int | None
    """Samples of all epochs but the last where that one is shuffled apart, else None."""


def plan_epochs(
    tokens_per_epoch: int,
    *,
    num_samples: int | None,
    sequence_length: int,
    extra_token: int,
    keep_partial: bool,
) -> EpochPlan:
    """The fewest epochs that hold `num_samples` samples.

    The last epoch is shuffled apart where fewer than 80 % of its samples are wanted, so that a run that ends
    there has not seen some documents once more than others.

    Args:
        tokens_per_epoch: P, at least 0.
        num_samples: N, at least 0, or None for one epoch.
        sequence_length: tokens from one sample's start to the next, at least 1.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        keep_partial: whether a last sample that is not full counts; its number is computed in single
            precision, as Megatron Core does it.

    Raises:
        ArgumentError: an argument is out of range.
        PlanError: samples are asked for, and there are no tokens.

    >>> plan_epochs(100, num_samples=15, sequence_length=10, extra_token=1, keep_partial=False)
    EpochPlan(num_epochs=2, num_samples=19, samples_before_last=9)
    """
    if tokens_per_epoch < 0 or (num_samples or 0) < 0 or sequence_length < 1 or extra_token not in (0, 1):
        msg = (
            "tokens_per_epoch and num_samples must be at least 0, sequence_length at least 1 and extra_token "
            f"0 or 1, found {tokens_per_epoch}, {num_samples}, {sequence_length} and {extra_token}"
        )
        raise ArgumentError(msg)
    if tokens_per_epoch == 0 and num_samples:
        msg = f"a dataset must have tokens to give {num_samples} samples, found none"
        raise PlanError(msg)
    num_epochs = 1
    if num_samples:
        num_epochs = max(1, -(-(num_samples * sequence_length + extra_token) // tokens_per_epoch))
    before_last = None
    if num_epochs > 1 and num_samples is not None:
        before_last = ((num_epochs - 1) * tokens_per_epoch - extra_token) // sequence_length
        from_last = num_samples - before_last
        per_epoch = (tokens_per_epoch - extra_token) // sequence_length
        if from_last >= int(_SEPARATE_BELOW * per_epoch):
            before_last = None
    return EpochPlan(
        num_epochs=num_epochs,
        num_samples=samples_in(num_epochs * tokens_per_epoch - extra_token, sequence_length, keep_partial=keep_partial),
        samples_before_last=before_last,
    )


def samples_in(tokens: int, sequence_length: int, *, keep_partial: bool) -> int:
    """Samples that a stream of so many tokens, the extra one taken off, is cut into; 0 for a negative number.

    >>> samples_in(99, 10, keep_partial=False), samples_in(99, 10, keep_partial=True)
    (9, 10)
    """
    if tokens < 0:
        return 0
    if keep_partial:
        return int(np.ceil(np.float32(tokens) / np.float32(sequence_length)))
    return tokens // sequence_length


def stretches_per_epoch(num_tokens: int, *, sequence_length: int, extra_token: int) -> int:
    """Samples that one epoch of a split gives in the order "instant", where samples are stretches of its tokens.

    A split with fewer tokens than one sample gives one, which repeats them. Without tokens there is none.

    Args:
        num_tokens: tokens of the split, at least 0.
        sequence_length: tokens from one sample's start to the next.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.

    >>> [stretches_per_epoch(tokens, sequence_length=4, extra_token=1) for tokens in (0, 1, 4, 5, 8, 9)]
    [0, 1, 1, 1, 1, 2]
    """
    return max((num_tokens - extra_token) // sequence_length, int(num_tokens > 0))
