"""Dry run of a blend: draws from every dataset by split and stage, by the rules of the builder.

Shapes: K datasets of a split, T stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trackbed.blends.draws import DrawCounter, SplitDraws, StageDraws
from trackbed.blends.measure import MeasuredBlend
from trackbed.blends.members import Member
from trackbed.blends.toml_tables import Problems
from trackbed.datasets.config import COMPUTED
from trackbed.datasets.gpt.config import GPTDatasetConfig
from trackbed.index import Split
from trackbed.index.packing import PackingSummary
from trackbed.plural import number_of

_USEFUL_EPOCHS: Final = 4
"""Passes after which a repeated text teaches clearly less than a new one."""
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPlan:
    """Draws from one dataset in a split."""

    name: str
    entry: str
    """Name of its `[[dataset]]`, which several datasets of a glob share."""
    prefix: str
    pairs: int
    """Number of pairs that it is read from."""
    documents: int
    """Documents in its part of the split; estimated if documents have several sequences."""
    tokens: int
    """Tokens in its part of the split."""
    weight: float
    """Its share of the samples."""
    samples: int
    """Samples that the blend draws from it; in the order "megatron", to within one."""
    samples_built: int
    """Minimum number of samples that its indices are built for, including the surplus."""
    tokens_drawn: int
    epochs: float
    """Epochs over its tokens that the drawn samples take."""
    max_epochs: float | None
    shortfall: str | None
    """Description of its shortfall; None if there is none."""
    packing: PackingSummary | None = None
    """Fill of its packs; None in other orders than "packed"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """Plan of one split."""

    split: str
    asked: int | None
    """Samples that were asked for; None for all samples of its datasets."""
    samples: int
    """Samples of the blend, at least as many as requested."""
    tokens: int
    datasets: tuple[DatasetPlan, ...]
    stages: tuple[StageDraws, ...]
    """`[T]` stages, at least one."""
    notes: tuple[str, ...] = ()
    """Sentences that say why there are more samples than were asked for, or are drawn, and which datasets are read very
    often; empty if there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendPlan:
    """Plan of a blend file."""

    order: str
    sequence_length: int
    splits: tuple[SplitPlan, ...]
    """Splits that have data."""
    problems: Problems
    """Shortfalls of all datasets; `stop` raises them."""


def plan_blend(blend: MeasuredBlend) -> BlendPlan:
    """Plans the draws from every dataset, as the builder would make them. Does not read the data.

    A shortfall of a dataset is not raised, but added to `problems` of the plan.
    """
    problems = blend.file.problems()
    config = blend.plan_config()
    plans = [_plan_split(blend, config, split, problems) for split in Split if blend.of(split)]
    return BlendPlan(
        order=blend.file.order,
        sequence_length=blend.file.sequence_length,
        splits=tuple(plans),
        problems=problems,
    )


def _plan_split(blend: MeasuredBlend, config: GPTDatasetConfig, split: Split, problems: Problems) -> SplitPlan:
    counter, members = DrawCounter(blend, config, split), blend.of(split)
    asked = blend.sizes[split.value]
    draws, stages = counter.count()
    datasets = []
    for number, member in enumerate(members):
        short = counter.shortfall(number, draws)
        if short is not None:
            where = (*member.entry.where, *([short.key] if short.key else []))
            problems.add(where, f"of {member.name!r}, split {split.name}, {short.text}")
        datasets.append(_plan_dataset(counter, member, number, draws, None if short is None else short.text))
    if counter.failure is not None:
        problems.add(("dataset",), f"of {split.name}: {counter.failure}")
    return SplitPlan(
        split=split.name,
        asked=asked,
        samples=draws.size,
        tokens=draws.size * config.sequence_length,
        datasets=tuple(datasets),
        stages=stages,
        notes=(
            *_notes(config, draws, datasets, asked, has_weights=blend.weights[split.value] is not None),
            *(_many_epochs(counter, draws, members) if split is Split.train else ()),
        ),
    )


def _many_epochs(counter: DrawCounter, draws: SplitDraws, members: Sequence[Member]) -> Iterator[str]:
    """Yields a sentence if datasets are read more often than is of use."""
    epochs = [(member.name, counter.pair_epochs(number, draws)) for number, member in enumerate(members)]
    many = sorted((one for one in epochs if one[1] > _USEFUL_EPOCHS), key=lambda one: -one[1])
    if many:
        names = ", ".join(f"{name!r} ({each:,.{2 if each < 100 else 0}f})" for name, each in many[:_NAMES_SHOWN])
        more = f" and {number_of(len(many) - _NAMES_SHOWN, 'other')}" if len(many) > _NAMES_SHOWN else ""
        yield f"more than {_USEFUL_EPOCHS} epochs of {names}{more}: a repeated text teaches less each time"


def _notes(
    config: GPTDatasetConfig,
    draws: SplitDraws,
    datasets: Sequence[DatasetPlan],
    asked: int | None,
    *,
    has_weights: bool,
) -> tuple[str, ...]:
    notes = []
    if asked is not None and draws.size > asked:
        why = why_more_samples(config, is_blended=len(datasets) > 1)
        notes.append(f"{number_of(draws.size, 'sample')} for {asked:,} asked for, as {why}")
    built = sum(one.samples_built for one in datasets)
    if built > draws.size and config.order not in COMPUTED:
        why = why_more_are_built(config, has_weights=has_weights)
        notes.append(f"indices are built for at least {number_of(built, 'sample')}, as {why}")
    return tuple(notes)


def _plan_dataset(
    counter: DrawCounter, member: Member, number: int, draws: SplitDraws, shortfall: str | None
) -> DatasetPlan:
    built = draws.built[number]
    drawn = draws.drawn[number]
    return DatasetPlan(
        name=member.name,
        entry=member.entry.name,
        prefix=member.prefix,
        pairs=len(member.pairs),
        documents=counter.documents[number],
        tokens=counter.tokens[number],
        weight=draws.weights[number],
        samples=drawn,
        samples_built=counter.available(number, None) if built is None else built,
        tokens_drawn=drawn * counter.sequence_length,
        epochs=counter.epochs(number, drawn),
        max_epochs=counter.limits[number],
        shortfall=shortfall,
        packing=counter.packing(number),
    )


def why_more_samples(config: GPTDatasetConfig, *, is_blended: bool) -> str:
    """Returns the reason why a split has more samples than were asked for, as a clause."""
    if not is_blended:
        return "a dataset has all samples of the epochs that it needs"
    if config.renormalize_blend_weights is not None:
        return "the share of each dataset has a surplus of 0.5 %, as in Megatron Core 0.10, and is rounded up"
    return "the share of each dataset is rounded up"


def why_more_are_built(config: GPTDatasetConfig, *, has_weights: bool) -> str:
    """Returns the reason why datasets are built for more samples than are drawn from them, as a clause."""
    if not has_weights:
        return "a dataset without a weight has all samples of an epoch"
    if config.renormalize_blend_weights is not None:
        return "the share of each dataset has a surplus of 0.5 %, as in Megatron Core 0.10"
    percent = f"{100 * config.mid_level_dataset_surplus:g} %"
    return f"mid_level_dataset_surplus adds {percent} to the share of each dataset, rounded up"
