"""Blend file applied to the existing data: weights, sizes, and the configuration that builds it.

Shapes: K datasets of a split.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from trackbed.blends.blend_file import BlendFile
from trackbed.blends.members import Member, find_members
from trackbed.blends.packing import summarise_packs
from trackbed.blends.sizes import DatasetRequest, plan_weights
from trackbed.blends.tokenizer import StatedTokenizer, check_token_ids, make_tokenizer
from trackbed.blends.toml_tables import Problems
from trackbed.builder.plan_split import check_sizes
from trackbed.datasets.config import COMPUTED, Blend
from trackbed.datasets.gpt.config import GPTDatasetConfig
from trackbed.datasets.mask_check import tell_of_masks
from trackbed.errors import ArgumentError, PlanError
from trackbed.index.splits import (
    Bounds,
    Split,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from trackbed.tokens.format import PairHeader

if TYPE_CHECKING:
    from trackbed.datasets.gpt.dataset import GPTDataset

_PLANNING_TOKENIZER: Final = StatedTokenizer(eod=0, vocab_size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlend:
    """A blend file and the data that it names, with everything that a builder needs."""

    file: BlendFile
    members: tuple[Member, ...]
    """All datasets, in the order of the file."""
    weights: tuple[tuple[float, ...] | None, ...]
    """For each split, the `[K]` weights of its datasets; None if they are used whole."""
    sizes: tuple[int | None, int | None, int | None]
    """Number of samples of each split, in the form that `BlendedMegatronDatasetBuilder` takes."""
    headers: Mapping[str, PairHeader] = field(default_factory=dict, repr=False, compare=False)
    """Headers of the pairs in object stores; a builder that gets them does not ask the stores again."""

    @property
    def dataset_class(self) -> "type[GPTDataset]":
        """Class of the blended datasets."""
        return self.file.dataset_class

    def of(self, split: Split) -> tuple[Member, ...]:
        """Returns the `[K]` datasets of a split."""
        return tuple(member for member in self.members if member.split_tokens[split.value] is not None)

    def config(self, *, tokenizer: Any | None = None, cache: str | None = None) -> GPTDatasetConfig:
        """Returns the configuration that builds this blend.

        Args:
            tokenizer: replaces the one that the file names.
            cache: replaces the folder that the file names.

        Raises:
            BlendFileError: neither the file nor the caller names a tokenizer, that of the file cannot be opened, the
                tokens are not of it, or fields contradict each other.
        """
        return self._config(self.tokenizer() if tokenizer is None else tokenizer, cache or self.file.cache)

    def tokenizer(self) -> Any:
        """Opens the tokenizer that the file names.

        Raises:
            BlendFileError: it names none, or one that cannot be opened, or that the tokens are not of.
        """
        problems, where, entry = self.file.problems(), ("tokenizer",), self.file.tokenizer
        tokenizer = None
        if entry is None:
            problems.add(where, "must be given to build a dataset, found none")
        else:
            try:
                tokenizer = make_tokenizer(entry)
            except ArgumentError as error:
                problems.add(where, f"must be one that can be opened, but: {error}")
            else:
                check_token_ids(self.members, tokenizer, problems)
        problems.stop()
        return tokenizer

    def plan_config(self) -> GPTDatasetConfig:
        """Returns the configuration for planning, with a placeholder for the tokenizer, which does not affect sizes."""
        return self._config(_PLANNING_TOKENIZER, self.file.cache)

    def _config(self, tokenizer: Any, cache: str | None) -> GPTDatasetConfig:
        file = self.file
        storage = file.storage
        stored = {} if storage is None else {"object_storage_cache_path": storage.path_to_idx_cache}
        options = {**({} if storage is None else {"mmap_bin_files": False}), **file.options, **stored}
        contiguous = tuple(member.prefix for member in self.members if not member.entry.packed)
        groups = {member.prefix: list(member.pairs) for member in self.members if member.entry.kind == "group"}
        try:
            return GPTDatasetConfig(
                random_seed=file.seed,
                sequence_length=file.sequence_length,
                path_to_cache=cache,
                tokenizer=tokenizer,
                order=file.order,
                groups=groups or None,
                pack_contiguous=contiguous or None,
                **self._blends(),
                **self._instant_options(),
                **options,
            )
        except ArgumentError as error:
            problems = file.problems()
            option = str(error).split(maxsplit=1)[0]
            problems.add(("options", option) if option in file.options else (), str(error))
            problems.stop()
            raise

    def _blends(self) -> dict[str, Any]:
        if self.file.split is not None:
            return {"blend": self._blend(Split.train), "split": self.file.split}
        return {"blend_per_split": [self._blend(split) if self.of(split) else None for split in Split]}

    def _blend(self, split: Split) -> Blend:
        members = self.members if self.file.split is not None else self.of(split)
        weights = self.weights[split.value]
        return [member.prefix for member in members], None if weights is None else list(weights)

    def _instant_options(self) -> dict[str, Any]:
        if self.file.order not in COMPUTED:
            return {}
        members = self.of(Split.train)
        limits = [member.entry.max_epochs for member in members]
        stages = self.file.schedule or [
            (stage.first_sample, self.weights_of(dict(stage.weights)), stage.ramp) for stage in self.file.stages
        ]
        several = len(members) > 1  # a single dataset is not blended: the plan checks its limit
        return {
            "blend_stages": list(stages) or None,
            "blend_max_epochs": limits if several and any(limits) else None,
        }

    def weights_of(self, weights: Mapping[str, float]) -> list[float]:
        """Returns the `[K]` weights of the datasets of training, by the names in the file; 0 where none is given."""
        return [weights.get(member.entry.name, 0.0) * member.part for member in self.of(Split.train)]


def measure_blend(file: BlendFile) -> MeasuredBlend:
    """Finds the data that a blend file names, and computes weights and sizes.

    Raises:
        BlendFileError: datasets are missing or damaged, or cannot provide the requested amounts; lists all problems,
            each with its line.
    """
    problems = file.problems()
    found = find_members(file.datasets, _bounds(file), problems, storage=file.storage)
    problems.stop()
    _check_limits_of_repeats(file, found.members, problems)
    blend = replace(_with_weights(file, found.members, problems), headers=found.headers)
    tell_of_masks((pair for member in found.members for pair in member.pairs), file.order, where=file.path)
    problems.stop()
    config = blend.plan_config()
    try:
        check_sizes(blend.sizes, config)
    except ArgumentError as error:
        problems.add(("size",), str(error))
    problems.stop()
    return blend


def _check_limits_of_repeats(file: BlendFile, members: Sequence[Member], problems: Problems) -> None:
    """Refuses limits that the order cannot keep: it counts the epochs of each dataset by itself."""
    if file.options.get("blend_when_exhausted") != "reweight":
        return
    drawn = [member for member in members if member.split_tokens[Split.train.value] is not None]
    times: Counter[Hashable] = Counter()
    for member in drawn:
        times.update(member.repeated)
    for member in drawn:
        if member.entry.max_epochs is not None and any(times[pair] > 1 for pair in member.repeated):
            problems.add(
                (*member.entry.where, "max_epochs"),
                'must be omitted with options.blend_when_exhausted = "reweight" for a pair that occurs several times, '
                f"found {member.name!r}",
            )


def _bounds(file: BlendFile) -> tuple[Bounds | None, ...]:
    if file.split is None:
        return ((0.0, 1.0),) * len(Split)
    return tuple(convert_split_vector_to_split_matrix(parse_and_normalize_split(file.split)))


def _with_weights(file: BlendFile, members: tuple[Member, ...], problems: Problems) -> MeasuredBlend:
    """Computes weights and sizes. If the file divides every dataset, all splits have the same weights."""
    weights: list[tuple[float, ...] | None] = []
    sizes = [file.sizes.of(split) for split in Split]
    if file.options.get("full_validation"):
        sizes[Split.valid.value] = None
    for split in Split:
        mine = [member for member in members if file.split is not None or member.split_tokens[split.value] is not None]
        if file.split is not None and weights:
            weights.append(weights[0])
            continue
        weights_of_split = None
        try:
            if mine:
                requests = [_request(member, split, file) for member in mine]
                weights_of_split, sizes[split.value] = plan_weights(
                    requests, size=sizes[split.value], sequence_length=file.sequence_length
                )
        except (PlanError, ArgumentError) as error:
            problems.add(mine[0].entry.where[:1], f"of {split.name}: {error}")
        weights.append(None if weights_of_split is None else tuple(weights_of_split))
    return MeasuredBlend(file=file, members=members, weights=tuple(weights), sizes=(sizes[0], sizes[1], sizes[2]))


def _request(member: Member, split: Split, file: BlendFile) -> DatasetRequest:
    entry = member.entry
    split_tokens = member.split_tokens[split.value] or 0
    if file.order == "packed" and entry.measure == "epochs":  # an epoch is a number of packs
        packing = summarise_packs(member, split, file.options, sequence_length=file.sequence_length)
        split_tokens = packing.packs * file.sequence_length
    return DatasetRequest(
        measure=entry.measure,
        amount=entry.amount,
        tokens=member.tokens,
        split_tokens=split_tokens,
        part=member.part if entry.measure == "weight" else 1.0,
    )
