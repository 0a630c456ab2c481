"""Number of epochs that a dataset needs for the requested samples, and whether its last epoch is separate.

Shapes: P tokens per epoch, E epochs, N samples requested, R samples available.
"""

from dataclasses import dataclass

import numpy as np

from trackbed.errors import ArgumentError, PlanError
from trackbed.plural import number_of

_SEPARATE_BELOW = 0.80  # fraction of an epoch's samples that is needed from the last epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Sizes from which the three indices of a dataset are built."""

    num_epochs: int
    num_samples: int
    """Samples in all epochs together, at least as many as were requested."""
    samples_before_last: int | None
    """Samples of all epochs but the last if the last one is shuffled separately, else None."""


def plan_epochs(
    tokens_per_epoch: int,
    *,
    num_samples: int | None,
    sequence_length: int,
    extra_token: int,
    keep_partial: bool,
) -> EpochPlan:
    """Plans the fewest epochs that hold `num_samples` samples.

    The last epoch is shuffled separately if fewer than 80 % of its samples are needed. Otherwise a run that ends
    inside it would have seen some documents once more than others.

    Args:
        tokens_per_epoch: P, at least 0.
        num_samples: N, at least 0, or None for one epoch.
        sequence_length: tokens from one sample's start to the next, at least 1.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        keep_partial: True to count a last sample that is not full. The number of samples is then computed in single
            precision, as in Megatron Core.

    Raises:
        ArgumentError: an argument is out of range.
        PlanError: samples are requested of a dataset without tokens.

    >>> plan_epochs(100, num_samples=15, sequence_length=10, extra_token=1, keep_partial=False)
    EpochPlan(num_epochs=2, num_samples=19, samples_before_last=9)
    """
    if tokens_per_epoch < 0 or (num_samples or 0) < 0 or sequence_length < 1 or extra_token not in (0, 1):
        raise ArgumentError(
            "tokens_per_epoch and num_samples must be at least 0, sequence_length at least 1 and extra_token "
            f"0 or 1, found {tokens_per_epoch}, {num_samples}, {sequence_length} and {extra_token}"
        )
    if tokens_per_epoch == 0 and num_samples:
        raise PlanError(f"a dataset must have tokens to give {number_of(num_samples, 'sample')}, found none")
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
    """Number of samples in a stream of tokens, 0 if `tokens` is negative.

    Args:
        tokens: tokens of the stream without the extra token.
        sequence_length: tokens from one sample's start to the next.
        keep_partial: True to count a last sample that is not full.

    >>> samples_in(99, 10, keep_partial=False), samples_in(99, 10, keep_partial=True)
    (9, 10)
    """
    if tokens < 0:
        return 0
    if keep_partial:
        return int(np.ceil(np.float32(tokens) / np.float32(sequence_length)))
    return tokens // sequence_length


def stretches_per_epoch(num_tokens: int, *, sequence_length: int, extra_token: int) -> int:
    """Samples in one epoch of a split in the order "instant", whose samples are contiguous stretches of tokens.

    A split with fewer tokens than one sample has one sample, which repeats them. A split without tokens has none.

    Args:
        num_tokens: tokens of the split, at least 0.
        sequence_length: tokens from one sample's start to the next.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.

    >>> [stretches_per_epoch(tokens, sequence_length=4, extra_token=1) for tokens in (0, 1, 4, 5, 8, 9)]
    [0, 1, 1, 1, 1, 2]
    """
    return max((num_tokens - extra_token) // sequence_length, int(num_tokens > 0))
