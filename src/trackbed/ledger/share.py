"""The share of a rank in a step, and the line that all ranks' shares make."""

import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Final

from trackbed.errors import ArgumentError
from trackbed.loading.sample_hashes import DIGEST_BYTES, SampleHashes, hash_of_batch, joined

SECONDS: Final = ("stall_seconds", "checkpoint_seconds", "communication_seconds")


def share_of(
    batches: Sequence[SampleHashes], losses: Sequence[float], num_ranks: int, fields: dict[str, Any]
) -> dict[str, Any]:
    """Returns what a rank tells the others of its part of a step: 100 bytes a sample.

    Args:
        batches: the micro-batches.
        losses: loss of each sample, or of this rank's samples together; may be empty.
        num_ranks: number of ranks that read different samples.
        fields: further values; those in `SECONDS` are this rank's.
    """
    return {
        "positions": [int(one) for batch in batches for one in batch.positions],
        "digests": b64encode(b"".join(batch.digests for batch in batches)).decode(),
        "first": min((int(one) for one in batches[0].positions), default=None) if batches else None,
        "datasets": [int(one) for batch in batches for one in batch.datasets],
        "num_tokens": max((batch.num_tokens for batch in batches), default=0),
        "losses": list(losses),
        "num_ranks": num_ranks,
        "fields": fields,
    }


def in_global_batches(batches: Sequence[SampleHashes], size: int, num_ranks: int) -> list[SampleHashes]:
    """Joins the micro-batches of a rank to one batch for each global batch.

    Args:
        batches: micro-batches of one size, which divides `size` / `num_ranks`.
        size: samples of a global batch.
        num_ranks: number of ranks that read different samples.

    Raises:
        ArgumentError: the last global batch is not whole.
    """
    num_samples = num_ranks * sum(len(batch.positions) for batch in batches)
    if num_samples % size:
        raise ArgumentError(f"a step must have whole global batches of {size} samples, found {num_samples} samples")
    count = len(batches) * size // num_samples
    return [joined(batches[first : first + count]) for first in range(0, len(batches), count)]


def line_of(step: int, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the line of a step. Sums are exact, so that it does not depend on how many ranks share the samples.

    Args:
        step: number of the step.
        shares: the shares of all ranks, as JSON decodes them.
    """
    digests: dict[int, bytes] = {}
    datasets: dict[int, int] = {}
    losses: dict[int, float | None] = {}
    for share in shares:
        raw = b64decode(share["digests"])
        positions = share["positions"]
        for number, position in enumerate(positions):
            digests[position] = raw[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
            datasets[position] = share["datasets"][number]
        losses.update(zip(positions, share["losses"], strict=False))
    is_by_sample = all(len(share["losses"]) == len(share["positions"]) for share in shares)
    losses = losses if is_by_sample else {}
    first = shares[0]
    of_datasets: dict[int, list[int]] = {}
    for position, number in datasets.items():
        of_datasets.setdefault(number, []).append(position)
    return {
        "step": step,
        "first_sample": min((one["first"] for one in shares if one["first"] is not None), default=None),
        "num_samples": len(digests),
        "num_ranks": first["num_ranks"],
        "loss": mean(list(losses.values())) if is_by_sample else _mean_of_ranks(shares),
        "datasets": {
            str(number): _of_dataset(of_datasets[number], losses, first["num_tokens"]) for number in sorted(of_datasets)
        },
        **first["fields"],
        **{name: max((share["fields"].get(name) or 0.0) for share in shares) for name in SECONDS},
        "batch_hash": hash_of_batch(digests.items()),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean, the same in any order of the values; None if one is none, or not finite.

    >>> mean([1e16, 1.0, -1e16]), mean([1.0, None]), mean([])
    (0.3333333333333333, None, None)
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return _sum(known) / len(known)


def _mean_of_ranks(shares: Sequence[dict[str, Any]]) -> float | None:
    """Mean of the ranks' mean losses, each weighted by its samples."""
    of_ranks = [(mean(share["losses"]), len(share["positions"])) for share in shares if share["positions"]]
    known = [(loss, count) for loss, count in of_ranks if loss is not None]
    if len(known) < len(of_ranks) or not known:
        return None
    return _sum(loss * count for loss, count in known) / sum(count for _, count in known)


def _sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond the largest float
        return math.inf


def _of_dataset(positions: Sequence[int], losses: dict[int, float | None], num_tokens: int) -> list[Any]:
    """Number of tokens, and the mean loss where it is known by sample."""
    loss = mean([losses.get(position) for position in positions])
    return [len(positions) * num_tokens, None if loss is None else float(f"{loss:.7g}")]
