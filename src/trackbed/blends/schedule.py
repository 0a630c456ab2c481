"""Stages of a blend that changes while a run reads it: what was drawn stays, and the rest is as the file says.

Shapes: K datasets.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from trackbed.datasets.blend.dataset import BlendedDataset
from trackbed.datasets.config import COMPUTED, Stage
from trackbed.errors import ArgumentError
from trackbed.index import BlendStage, InstantOrder, Split
from trackbed.index.interleaving import Weight, integer_weights

_FIXED: Final = (
    *("order", "random_seed", "sequence_length", "shuffle_block", "shuffle_window"),
    *("pack_multiple", "pack_most_documents", "pack_window", "pack_long"),
)
"""Fields of a configuration that decide samples, which stay while a run goes on."""


def schedule_of(dataset: BlendedDataset) -> list[BlendStage]:
    """Returns the stages of a dataset of training, from sample 0 on."""
    further = [BlendStage(*one) for one in dataset.config.blend_stages or ()]
    return _without_empty([BlendStage(0, tuple(dataset.weights)), *further])


def plain_stages(stages: Sequence[BlendStage]) -> tuple[Stage, ...]:
    """Returns stages as the configuration of a dataset takes them, with weights as floats."""
    return tuple((one.first_sample, [float(weight) for weight in one.weights], one.ramp) for one in stages)


def continued(before: Sequence[BlendStage], after: Sequence[BlendStage], position: int) -> list[BlendStage]:
    """Returns the stages of a run that goes over from one blend to another.

    Args:
        before: stages up to now, the first of which begins at sample 0.
        after: those of the other blend, in which further datasets may follow those of `before`.
        position: first sample that is drawn from the other blend.

    >>> old = [BlendStage(0, (1, 1))]
    >>> continued(old, [BlendStage(0, (1, 1, 0)), BlendStage(50, (0, 0, 1)), BlendStage(90, (1, 0, 0))], 70)[1:]
    [BlendStage(first_sample=70, weights=(0, 0, 1), ramp=0), BlendStage(first_sample=90, weights=(1, 0, 0), ramp=0)]
    """
    num_datasets = len(after[0].weights)
    past = [_padded(one, num_datasets) for one in before if one.first_sample < position]
    future = [one for one in after if one.first_sample >= position]
    if not past or (future and future[0].first_sample == position):
        return [*past, *future]
    now = next(one for one in reversed(after) if one.first_sample < position)
    if _goes_on_as(past[-1], now, position):
        return [*past, *future]
    rest = max(0, now.first_sample + now.ramp - position)
    return [*past, BlendStage(position, now.weights, rest), *future]


def with_stage(stages: Sequence[BlendStage], stage: BlendStage) -> list[BlendStage]:
    """Returns stages with one more, which ends where the next one begins."""
    before = [one for one in stages if one.first_sample < stage.first_sample]
    if not before and stage.ramp:  # which begins from the weights of the first stage
        before = [BlendStage(0, stages[0].weights)]
    return [*before, stage, *(one for one in stages if one.first_sample > stage.first_sample)]


def check_same_data(before: BlendedDataset, after: BlendedDataset) -> None:
    """Checks that a blend has the datasets of another one, perhaps with more behind them, and reads them alike.

    Raises:
        ArgumentError: it has not; the message says what must be kept.
    """
    for name in _FIXED:
        old, new = (getattr(one.config, name, None) for one in (before, after))
        if old != new:
            raise ArgumentError(f"{name} must stay {old!r} while a run goes on, found {new!r}")
    if before.config.order not in COMPUTED:
        raise ArgumentError(f"order must be 'instant' or 'packed' to be changed, found {before.config.order!r}")
    if len(after.datasets) < len(before.datasets):
        paths = {str(one.dataset_path) for one in after.datasets}
        missing = [str(one.dataset_path) for one in before.datasets if str(one.dataset_path) not in paths]
        raise ArgumentError(
            f"datasets must stay while a run goes on, with weight 0 where they are not wanted: "
            f"{', '.join(missing) or 'one'} is missing"
        )
    for number, (old, new) in enumerate(zip(before.datasets, after.datasets, strict=False)):
        if _samples(old) != _samples(new):
            raise ArgumentError(
                f"dataset {number} must stay {str(old.dataset_path)!r}, with the same samples, as new ones come last: "
                f"found {str(new.dataset_path)!r}"
            )


def check_continued(before: BlendedDataset, after: BlendedDataset, position: int) -> None:
    """Checks that samples before a position are the same in both datasets.

    Raises:
        ArgumentError: they are not, or cannot be; the message says what must be kept.
    """
    check_same_data(before, after)
    orders = [one.order for one in (before, after)]
    pasts = [_past(one, position, len(after.datasets)) for one in orders if isinstance(one, InstantOrder)]
    if len(pasts) != len(orders) or pasts[0] != pasts[1]:
        raise ArgumentError(f"samples before {position} must stay as they were, found limits that would change them")


def blended(dataset: object) -> BlendedDataset:
    """Returns the dataset as a blend of training.

    Raises:
        ArgumentError: it is not one.
    """
    if not isinstance(dataset, BlendedDataset) or dataset.split is not Split.train:
        raise ArgumentError(f"a blend that changes must have several datasets from the start, found {dataset!r}")
    return dataset


def _samples(dataset: Any) -> Any:
    """What decides the samples of a dataset, without how many of them are drawn."""
    fields = dataset.sample_fields()
    if fields is None:
        return str(dataset.dataset_path)
    return {name: value for name, value in fields.items() if name not in ("num_samples", "size")}


def _past(order: InstantOrder, position: int, num_datasets: int) -> list[Any]:
    return [
        (stage.first_sample, _proportions(_padded(stage, num_datasets).weights), stage.ramp)
        for stage in _without_empty(order.stages)
        if stage.first_sample < position
    ]


def _without_empty(stages: Sequence[BlendStage]) -> list[BlendStage]:
    """The stages that have samples, or from which a ramp begins."""
    following: list[BlendStage | None] = [*stages[1:], None]
    return [
        stage
        for stage, after in zip(stages, following, strict=True)
        if after is None or after.ramp or after.first_sample > stage.first_sample
    ]


def _padded(stage: BlendStage, num_datasets: int) -> BlendStage:
    return BlendStage(stage.first_sample, (*stage.weights, *[0] * (num_datasets - len(stage.weights))), stage.ramp)


def _goes_on_as(old: BlendStage, new: BlendStage, position: int) -> bool:
    """True if both stages say the same from a position on."""
    ends = [one.first_sample + one.ramp for one in (old, new)]
    has_same_ramp = max(ends) <= position or (ends[0] == ends[1] and old.first_sample == new.first_sample)
    return has_same_ramp and _proportions(old.weights) == _proportions(new.weights)


def _proportions(weights: Sequence[Weight]) -> tuple[int, ...]:
    numbers = integer_weights(weights)
    common = math.gcd(*numbers)
    return tuple(number // common for number in numbers)
