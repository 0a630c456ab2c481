"""How many samples a split draws from each of its datasets, by the builder's own rules.

Shapes: K datasets of a split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from itertools import pairwise

from trackbed.builder.blend_file.measure import MeasuredBlend
from trackbed.builder.sizes import Shares, plan_shares
from trackbed.datasets.gpt_config import GPTDatasetConfig
from trackbed.errors import PlanError
from trackbed.index import BlendStage, InstantOrder, Split, largest_remainders, normalize, plan_epochs
from trackbed.index.epochs import EpochPlan, stretches_per_epoch

__all__ = ["DrawCounter", "Draws", "Shortfall", "StagePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Samples of a split, before it is known what they come to."""

    size: int
    weights: Sequence[float]
    built: Sequence[int | None]
    """`[K]` samples that each dataset is asked for, or None for one epoch."""
    drawn: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A stretch of the blend in which one set of weights holds."""

    first_sample: int
    stop_sample: int
    samples: tuple[int, ...]
    """`[K]` samples drawn from each dataset."""
    ended: tuple[str, ...]
    """Names of the datasets that have given their epochs when it begins."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What a dataset cannot give."""

    key: str
    """The key of the file that says otherwise; empty for the dataset as a whole."""
    text: str
    """What must hold, what was found, and by how much it falls short."""


class DrawCounter:
    """Counts what the datasets of one split give.

    Args:
        blend: the blend.
        config: its configuration.
        split: the split.
    """

    def __init__(self, blend: MeasuredBlend, config: GPTDatasetConfig, split: Split) -> None:
        self._config = config
        self._split = split
        self._blend = blend
        self._members = blend.of(split)
        self.tokens = [member.split_tokens[split.value] or 0 for member in self._members]
        self.sequence_length = config.sequence_length
        self._size = blend.sizes[split.value]
        self.failure: str | None = None
        """Why the blend as a whole cannot be drawn, found by `count`."""
        self.limits = [member.entry.max_epochs if split is Split.train else None for member in self._members]

    def count(self) -> tuple[Draws, tuple[StagePlan, ...]]:
        """Samples of all datasets, and of each stage."""
        draws = self._draws()
        if self._config.order == "instant" and self._is_blended and draws.size and not self._lacking(draws):
            return self._instant(draws)
        return draws, (self._stage(0, draws.size, draws.drawn),)

    @property
    def _is_blended(self) -> bool:
        """Whether the builder makes a blend, where it does not take the only dataset as it is."""
        weights = self._blend.weights[self._split.value]
        return len(self._members) > 1 or (self._blend.file.split is not None and weights is not None)

    def _draws(self) -> Draws:
        weights, count = self._blend.weights[self._split.value], len(self._members)
        apart = self._split is Split.valid and bool(self._config.multiple_validation_sets)
        if not self._is_blended or apart:
            given = [self._size] * count
            lengths = [self.available(number, self._size) for number in range(count)]
            taken = [min(length, self._size) if self._size is not None else length for length in lengths]
            shares = normalize(lengths) if any(lengths) else [1 / count] * count
            return Draws(size=sum(taken), weights=shares, built=given, drawn=taken)
        if weights is None:
            lengths = [self.available(number, None) for number in range(count)]
            size = sum(lengths) if self._size is None else min(self._size, sum(lengths))
            shares = normalize(lengths) if any(lengths) else [1 / count] * count
            drawn = lengths if size == sum(lengths) else largest_remainders(shares, size)
            return Draws(size=size, weights=shares, built=[None] * count, drawn=drawn)
        shared: Shares = plan_shares(normalize(weights), self._size or 0, self._config)
        drawn = largest_remainders(shared.weights, shared.size)
        return Draws(size=shared.size, weights=shared.weights, built=shared.per_dataset, drawn=drawn)

    def _instant(self, draws: Draws) -> tuple[Draws, tuple[StagePlan, ...]]:
        """The draws that the order itself counts, by stage."""
        order = self._order(draws)
        borders = [*(min(stage.first_sample, draws.size) for stage in order.stages), draws.size]
        counts = [order.counts_before(border) for border in borders]
        found = [
            self._stage(
                start,
                stop,
                (after - before).tolist(),
                [self._members[one.dataset].name for one in order.exhaustions if one.sample == start],
            )
            for (start, stop), (before, after) in zip(pairwise(borders), pairwise(counts), strict=True)
        ]
        total = [sum(each) for each in zip(*(stage.samples for stage in found), strict=True)]
        return Draws(size=draws.size, weights=draws.weights, built=draws.built, drawn=total), tuple(found)

    def _order(self, draws: Draws) -> InstantOrder:
        """The order that the blend would have, without limits where it cannot have it with them."""
        stages = [BlendStage(0, tuple(draws.weights))]
        if self._split is Split.train:
            stages += [BlendStage(first, tuple(weights)) for first, weights in self._config.blend_stages or ()]
        sizes = [self._per_epoch(number) for number in range(len(self._members))]
        seed = self._config.random_seed
        if self._config.blend_when_exhausted == "reweight" and any(self.limits):
            try:
                return InstantOrder.staged(
                    sizes=sizes,
                    stages=stages,
                    seed=seed,
                    num_samples=draws.size,
                    max_epochs=self.limits,
                    when_exhausted="reweight",
                )
            except PlanError as error:
                self.failure = str(error)
        return InstantOrder.staged(sizes=sizes, stages=stages, seed=seed, num_samples=draws.size)

    def _stage(self, start: int, stop: int, samples: Sequence[int], ended: Sequence[str] = ()) -> StagePlan:
        return StagePlan(first_sample=start, stop_sample=stop, samples=tuple(samples), ended=tuple(ended))

    def _lacking(self, draws: Draws) -> bool:
        """Whether a dataset that is to be drawn has no sample, so that there is no order to count by."""
        stages = self._config.blend_stages or () if self._split is Split.train else ()
        wanted = [any(each) for each in zip(draws.weights, *(weights for _, weights in stages), strict=True)]
        return any(want and not self._per_epoch(number) for number, want in enumerate(wanted))

    def _per_epoch(self, number: int) -> int:
        """Samples that one epoch gives, in the order "instant"."""
        config = self._config
        extra_token = int(config.add_extra_token_to_sequence)
        return stretches_per_epoch(self.tokens[number], sequence_length=config.sequence_length, extra_token=extra_token)

    def _epochs(self, number: int, num_samples: int | None) -> EpochPlan:
        config = self._config
        return plan_epochs(
            self.tokens[number],
            num_samples=num_samples,
            sequence_length=config.sequence_length,
            extra_token=int(config.add_extra_token_to_sequence),
            keep_partial=self._split is Split.valid and not config.drop_last_partial_validation_sequence,
        )

    def available(self, number: int, wanted: int | None) -> int:
        """Samples that the dataset has, if it is asked for so many; None for one epoch."""
        if self._config.order == "instant":
            return self._per_epoch(number) if wanted is None or not self._per_epoch(number) else wanted
        if self.tokens[number] == 0 and wanted:
            return 0
        return self._epochs(number, wanted).num_samples

    def shortfall(self, number: int, draws: Draws) -> Shortfall | None:
        """What a dataset lacks, or None."""
        wanted, limit = draws.drawn[number], self.limits[number]
        built, length = draws.built[number], self._config.sequence_length
        available = self.available(number, built)
        if (built or wanted) and not available:
            needed = max(built or 0, wanted)
            return Shortfall(
                "",
                f"must have tokens for {needed:,} samples of {length:,}, found {self.tokens[number]:,}: "
                "take another split, put it into a group, or leave it out of this split by `splits`",
            )
        is_exact = self._config.order != "megatron"  # else give or take one: the builder draws, and counts
        if wanted - (not is_exact) > available and self._config.order != "instant":
            return Shortfall("", self._undersized(wanted, available))
        if limit is None or (self._is_blended and self._config.blend_when_exhausted == "reweight"):
            return None
        short = wanted - self._most(number, limit)
        return Shortfall("max_epochs", self._over_limit(number, wanted, limit, short)) if short > 0 else None

    def _undersized(self, wanted: int, available: int) -> str:
        return (
            f"must be built for the {wanted:,} samples that are drawn from it, found {available:,}: short by "
            f"{wanted - available:,}; raise options.mid_level_dataset_surplus, now "
            f"{self._config.mid_level_dataset_surplus}"
        )

    def _over_limit(self, number: int, wanted: int, limit: float, short: int) -> str:
        return (
            f"must be at least {_rounded_up(self.epochs(number, wanted)):g} to give {wanted:,} samples, "
            f"found {limit:g}, which gives {wanted - short:,}: "
            f"short by {short:,} samples, {short * self.sequence_length:,} tokens"
        )

    def _most(self, number: int, limit: float) -> int:
        """Samples that so many epochs give."""
        numerator, denominator = limit.as_integer_ratio()
        if self._config.order == "instant":  # by the rule of `index.instant_plan`
            return (2 * self._per_epoch(number) * numerator + denominator) // (2 * denominator)
        return self.tokens[number] * numerator // (denominator * self._config.sequence_length)

    def epochs(self, number: int, samples: int) -> float:
        """How often so many samples go through a dataset."""
        if self._config.order == "instant":
            return samples / self._per_epoch(number) if self._per_epoch(number) else 0.0
        return samples * self._config.sequence_length / self.tokens[number] if self.tokens[number] else 0.0


def _rounded_up(number: float) -> float:
    """The number rounded up to four digits, so that the limit in the message is high enough.

    >>> _rounded_up(80_623.4), _rounded_up(6.4581), _rounded_up(0.0)
    (80630.0, 6.459, 0.0)
    """
    if number <= 0:
        return 0.0
    unit = Decimal(1).scaleb(math.floor(math.log10(number)) - 3)
    return float((Decimal(number) / unit).to_integral_value(ROUND_CEILING) * unit)
