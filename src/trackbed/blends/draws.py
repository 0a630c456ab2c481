"""Number of samples that a split draws from each of its datasets, by the rules of the builder.

Shapes: K datasets of a split.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from itertools import pairwise
from typing import Final

from trackbed.blends.measure import MeasuredBlend
from trackbed.blends.packing import summarise_packs
from trackbed.builder.plan_split import plan_split
from trackbed.datasets.config import COMPUTED
from trackbed.datasets.gpt.config import GPTDatasetConfig
from trackbed.errors import PlanError
from trackbed.index import BlendStage, InstantOrder, Split, largest_remainders, normalize, plan_epochs
from trackbed.index.epochs import EpochPlan, stretches_per_epoch
from trackbed.index.packing import PackingSummary
from trackbed.plural import number_of

_NAMES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDraws:
    """Samples drawn in a split."""

    size: int
    weights: Sequence[float]
    built: Sequence[int | None]
    """`[K]` samples requested from each dataset, or None for one epoch."""
    drawn: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraws:
    """Samples drawn in one stage: a range of samples with one set of weights."""

    first_sample: int
    stop_sample: int
    samples: tuple[int, ...]
    """`[K]` samples drawn from each dataset."""
    ended: tuple[str, ...]
    """Names of the datasets that are exhausted at its start."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Amount that a dataset cannot provide."""

    key: str
    """Key of the file that conflicts with it; empty for the dataset as a whole."""
    text: str
    """Description: what must hold, what was found, and the missing amount."""


class DrawCounter:
    """Counts the samples drawn from the datasets of one split."""

    def __init__(self, blend: MeasuredBlend, config: GPTDatasetConfig, split: Split) -> None:
        self._config = config
        self._split = split
        self._blend = blend
        self._members = blend.of(split)
        self.tokens = [member.split_tokens[split.value] or 0 for member in self._members]
        self.documents = [member.split_documents[split.value] or 0 for member in self._members]
        self.sequence_length = config.sequence_length
        self._spec = plan_split(split, blend.sizes[split.value], config)
        self._is_blended = self._spec is not None and self._spec.is_blended
        self.failure: str | None = None
        """Reason why the blend as a whole cannot be drawn, set by `count`; None if there is none."""
        self._packs: dict[int, PackingSummary] = {}
        self.limits = [member.entry.max_epochs if split is Split.train else None for member in self._members]

    def count(self) -> tuple[SplitDraws, tuple[StageDraws, ...]]:
        """Counts the samples of all datasets, in total and by stage."""
        draws = self._draws()
        if self._config.order in COMPUTED and self._is_blended and draws.size and not self._lacks_samples(draws):
            return self._instant(draws)
        return draws, (self._stage(0, draws.size, draws.drawn),)

    def _draws(self) -> SplitDraws:
        spec, count = self._spec, len(self._members)
        if spec is None:
            return SplitDraws(size=0, weights=[], built=[], drawn=[])
        if spec.weights is not None:
            size = spec.size or 0
            drawn = largest_remainders(normalize(spec.weights), size)  # as `BlendedDataset` does, to the last bit
            return SplitDraws(size=size, weights=spec.weights, built=spec.requested, drawn=drawn)
        lengths = [self.available(number, wanted) for number, wanted in enumerate(spec.requested)]
        shares = normalize(lengths) if any(lengths) else [1 / count] * count
        if not spec.is_blended:
            drawn = [length if spec.size is None else min(length, spec.size) for length in lengths]
            return SplitDraws(size=sum(drawn), weights=shares, built=spec.requested, drawn=drawn)
        size = sum(lengths) if spec.size is None else min(spec.size, sum(lengths))
        drawn = lengths if size == sum(lengths) else largest_remainders(shares, size)
        return SplitDraws(size=size, weights=shares, built=spec.requested, drawn=drawn)

    def _instant(self, draws: SplitDraws) -> tuple[SplitDraws, tuple[StageDraws, ...]]:
        """Counts the draws by stage, with the counts of the order itself."""
        order = self._order(draws)
        borders = [*(min(stage.first_sample, draws.size) for stage in order.stages), draws.size]
        counts = [order.counts_before(border) for border in borders]
        stage_draws = [
            self._stage(
                start,
                stop,
                (after - before).tolist(),
                [self._members[one.dataset].name for one in order.exhaustions if one.sample == start],
            )
            for (start, stop), (before, after) in zip(pairwise(borders), pairwise(counts), strict=True)
        ]
        total = [sum(each) for each in zip(*(stage.samples for stage in stage_draws), strict=True)]
        return SplitDraws(size=draws.size, weights=draws.weights, built=draws.built, drawn=total), tuple(stage_draws)

    def _order(self, draws: SplitDraws) -> InstantOrder:
        """Returns the order of the blend; without limits, if it is impossible with them."""
        stages = [BlendStage(0, tuple(draws.weights))]
        if self._split is Split.train:
            stages += [BlendStage(*stage) for stage in self._config.blend_stages or ()]
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

    def _stage(self, start: int, stop: int, samples: Sequence[int], ended: Sequence[str] = ()) -> StageDraws:
        return StageDraws(first_sample=start, stop_sample=stop, samples=tuple(samples), ended=tuple(ended))

    def _lacks_samples(self, draws: SplitDraws) -> bool:
        """True if a dataset with a weight has no sample, so that no order exists to count by."""
        stages = self._config.blend_stages or () if self._split is Split.train else ()
        wanted = [any(each) for each in zip(draws.weights, *(stage[1] for stage in stages), strict=True)]
        return any(want and not self._per_epoch(number) for number, want in enumerate(wanted))

    def _per_epoch(self, number: int) -> int:
        """Returns the samples of one epoch in an order without an index."""
        config = self._config
        if config.order == "packed":
            return self._packing(number).packs
        extra_token = int(config.add_extra_token_to_sequence)
        return stretches_per_epoch(self.tokens[number], sequence_length=config.sequence_length, extra_token=extra_token)

    def packing(self, number: int) -> PackingSummary | None:
        """Returns how full the packs of a dataset are; None in other orders."""
        return self._packing(number) if self._config.order == "packed" else None

    def _packing(self, number: int) -> PackingSummary:
        """Packs the documents of a dataset. Reads their lengths, once."""
        if number not in self._packs:
            options = self._blend.file.options
            self._packs[number] = summarise_packs(
                self._members[number], self._split, options, sequence_length=self.sequence_length
            )
        return self._packs[number]

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
        """Returns the number of samples of a dataset built for `wanted` samples; None for one epoch."""
        if self._config.order in COMPUTED:
            return self._per_epoch(number) if wanted is None or not self._per_epoch(number) else wanted
        if self.tokens[number] == 0 and wanted:
            return 0
        return self._epochs(number, wanted).num_samples

    def shortfall(self, number: int, draws: SplitDraws) -> Shortfall | None:
        """Returns the shortfall of a dataset, or None."""
        drawn, limit = draws.drawn[number], self.limits[number]
        built, length = draws.built[number], self._config.sequence_length
        available = self.available(number, built)
        if (built or drawn) and not available:
            needed = max(built or 0, drawn)
            return Shortfall(
                "",
                f"must have tokens for {number_of(needed, 'sample')} of {length:,}, found {self.tokens[number]:,}: "
                "change `split`, add it to a group, or exclude it from this split with `splits`",
            )
        is_exact = self._config.order != "megatron"  # "megatron": exact to within one
        if drawn - (not is_exact) > available and self._config.order not in COMPUTED:
            return Shortfall("", self._undersized(drawn, available))
        if limit is None or (self._is_blended and self._config.blend_when_exhausted == "reweight"):
            return None
        others = self._repeats_of(number, draws)
        drawn += sum(samples for _, samples in others)
        short = drawn - self._max_samples(number, limit)
        names = [self._members[other].name for other, _ in others]
        return Shortfall("max_epochs", self._over_limit(number, drawn, limit, short, names)) if short > 0 else None

    def _repeats_of(self, number: int, draws: SplitDraws) -> list[tuple[int, int]]:
        """Returns the datasets that repeat a pair of a dataset, with the samples of it that take as many epochs.

        If several pairs are repeated, the epochs of the pair that is read most.
        """
        found = [self._repeats_of_pair(number, pair, draws) for pair in self._members[number].repeated]
        return max(found, key=lambda others: sum(samples for _, samples in others), default=[])

    def _repeats_of_pair(self, number: int, pair: Hashable, draws: SplitDraws) -> list[tuple[int, int]]:
        own = draws.drawn[number]
        found = []
        for other, member in enumerate(self._members):
            times = member.repeated.get(pair, 0) - (other == number)
            if times > 0:
                found.append((other, times * (own if other == number else self._as_samples_of(number, other, draws))))
        return found

    def _as_samples_of(self, number: int, other: int, draws: SplitDraws) -> int:
        """Returns the samples of a dataset that take as many epochs as those drawn from another one."""
        drawn, size, other_size = draws.drawn[other], self.tokens[number], self.tokens[other]
        if self._config.order in COMPUTED:
            size, other_size = self._per_epoch(number), self._per_epoch(other)
        return -(-drawn * size // other_size) if other_size else 0

    def pair_epochs(self, number: int, draws: SplitDraws) -> float:
        """Returns the epochs over a dataset, including the epochs of other datasets that repeat its pairs."""
        repeats = sum(samples for _, samples in self._repeats_of(number, draws))
        return self.epochs(number, draws.drawn[number] + repeats)

    def _undersized(self, wanted: int, available: int) -> str:
        return (
            f"must be built for the {number_of(wanted, 'sample')} that are drawn from it, found {available:,}: "
            f"short by {wanted - available:,}; raise options.mid_level_dataset_surplus, now "
            f"{self._config.mid_level_dataset_surplus}"
        )

    def _over_limit(self, number: int, wanted: int, limit: float, short: int, repeats: Sequence[str]) -> str:
        shown = ", ".join(map(repr, repeats[:_NAMES_SHOWN])) + (" and others" if len(repeats) > _NAMES_SHOWN else "")
        also = f" together with {shown}, which repeat{'s' * (len(repeats) == 1)} its pairs" if repeats else ""
        return (
            f"must be at least {_rounded_up(self.epochs(number, wanted)):,.10g} to give {number_of(wanted, 'sample')}"
            f"{also}, "
            f"found {limit:,.10g}, which gives {wanted - short:,}: "
            f"short by {number_of(short, 'sample')}, {number_of(short * self.sequence_length, 'token')}"
        )

    def _max_samples(self, number: int, limit: float) -> int:
        """Returns the maximum number of samples within `limit` epochs."""
        numerator, denominator = limit.as_integer_ratio()
        if self._config.order in COMPUTED:  # by the rule of `index.instant_plan`
            return (2 * self._per_epoch(number) * numerator + denominator) // (2 * denominator)
        return self.tokens[number] * numerator // (denominator * self._config.sequence_length)

    def epochs(self, number: int, samples: int) -> float:
        """Returns the number of epochs that `samples` samples of a dataset take."""
        if self._config.order in COMPUTED:
            return samples / self._per_epoch(number) if self._per_epoch(number) else 0.0
        return samples * self._config.sequence_length / self.tokens[number] if self.tokens[number] else 0.0


def _rounded_up(number: float) -> float:
    """Rounds up to four digits, so that the limit in the message suffices.

    >>> _rounded_up(80_623.4), _rounded_up(6.4581), _rounded_up(0.0)
    (80630.0, 6.459, 0.0)
    """
    if number <= 0:
        return 0.0
    unit = Decimal(1).scaleb(math.floor(math.log10(number)) - 3)
    return float((Decimal(number) / unit).to_integral_value(ROUND_CEILING) * unit)
