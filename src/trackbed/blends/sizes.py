"""Sizes of the splits, and weights of the datasets from the amounts that a blend file requests of each.

Shapes: K datasets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trackbed.blends.blend_file import SizeEntry
from trackbed.blends.toml_tables import COUNT, WHOLE, WHOLE_POSITIVE, TableReader, parse_count
from trackbed.builder.plan_split import MOST_SAMPLES
from trackbed.errors import PlanError
from trackbed.index.splits import Split

SIZE_KEYS: Final = {
    Split.train: ("train", "train_tokens", "train_iters"),
    Split.valid: ("valid", "eval_iters"),
    Split.test: ("test", "eval_iters"),
}
"""Keys that give the size of a split."""
_EVALUATION: Final = ("eval_interval", "eval_iters")
SizesAndBatch = tuple[SizeEntry, int | None]
"""Sizes, and the global batch size if given."""


def samples_for(tokens: int, sequence_length: int) -> int:
    """Returns the minimum number of samples that hold `tokens` tokens.

    >>> samples_for(100, 8)
    13
    """
    return -(-tokens // sequence_length)


def read_sizes(table: TableReader, *, sequence_length: int) -> SizesAndBatch:
    """Reads `[size]`."""
    numbers = {key: table.take(key, WHOLE) for key in ("train", "valid", "test")}
    tokens = table.take("train_tokens", COUNT)
    job = {key: table.take(key, WHOLE_POSITIVE) for key in ("train_iters", "global_batch_size", "eval_interval")}
    job["eval_iters"] = table.take("eval_iters", WHOLE)
    _check_keys(table)
    train = numbers["train"]
    if tokens is not None:
        train = samples_for(parse_count(tokens) if isinstance(tokens, str) else tokens, sequence_length)
    if job["train_iters"] is not None and job["global_batch_size"] is not None:
        train = job["train_iters"] * job["global_batch_size"]
    valid, test = _evaluation_sizes(job, train)
    table.refuse_unknown()
    return (
        SizeEntry(
            train=train,
            valid=numbers["valid"] if numbers["valid"] is not None else valid,
            test=numbers["test"] if numbers["test"] is not None else test,
        ),
        job["global_batch_size"],
    )


def _evaluation_sizes(job: dict[str, int | None], train: int | None) -> tuple[int | None, int | None]:
    """Returns the samples of validation and test, by the rule of Megatron-LM's training loop."""
    batch, interval, iterations = job["global_batch_size"], job["eval_interval"], job["eval_iters"]
    if batch is None or iterations is None:
        return None, None
    steps = job["train_iters"] if job["train_iters"] is not None else (train or 0) // batch
    valid = None if interval is None else (steps // interval + 1) * iterations * batch
    return valid, iterations * batch


def _check_keys(table: TableReader) -> None:
    for key in table.given(*SIZE_KEYS[Split.train])[1:]:
        table.refuse(key, f"must be the only size of training, found {table.given(*SIZE_KEYS[Split.train])[0]} too")
    for key in table.given("train_iters", *_EVALUATION):
        if not table.given("global_batch_size"):
            table.refuse(key, "needs size.global_batch_size, found none")
    for key, other in (_EVALUATION, _EVALUATION[::-1]):
        if table.given(key) and not table.given(other):
            table.refuse(key, f"needs size.{other}, found none")
    for split in (Split.valid, Split.test):
        if table.given(split.name) and table.given("eval_iters"):
            table.refuse(split.name, f"must be omitted if eval_iters gives the size of {split.name}, found both")


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
    measures = {request.measure for request in requests}
    if measures == {None}:
        return None, size
    if "epochs" not in measures:
        return _checked([_plain_weight(request) for request in requests]), size
    samples = [
        request.amount * request.split_tokens / sequence_length if request.measure == "epochs" else 0.0
        for request in requests
    ]
    if not sum(samples) < MOST_SAMPLES:
        raise PlanError(f"datasets must give fewer than 2**62 samples by their epochs, found {_whole(sum(samples))}")
    if measures == {"epochs"}:
        return _checked(samples), int(sum(samples)) if size is None else size
    remainder = (size or 0) - sum(samples)
    if remainder <= 0:
        needed = samples_for(int(sum(samples) * sequence_length), sequence_length)
        raise PlanError(
            f"datasets with epochs must leave samples to the others, found that they need {needed:,} "
            f"of {size or 0:,}: short by {needed - (size or 0) + 1:,}"
        )
    others = [0.0 if request.measure == "epochs" else _plain_weight(request) for request in requests]
    _checked(others)
    total = sum(others)
    return [mine + other * remainder / total for mine, other in zip(samples, others, strict=True)], size


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
