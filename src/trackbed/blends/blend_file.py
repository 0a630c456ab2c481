"""Contents of a blend file as frozen values (docs/formats/blend-file.md), independent of the data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trackbed.blends.toml_tables import KeyPath, Problems
from trackbed.datasets.config import COMPUTED, OrderName, Stage
from trackbed.datasets.tokenizers.base import MegatronIdentity
from trackbed.files.stores import is_address
from trackbed.index.splits import Split
from trackbed.tokens import ObjectStorageConfig, default_idx_cache

if TYPE_CHECKING:
    from trackbed.datasets.gpt.dataset import GPTDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """One `[[dataset]]`."""

    name: str
    kind: Literal["path", "glob", "group"]
    """One pair; pairs that are separate datasets; or pairs that form one dataset."""
    patterns: tuple[str, ...]
    """Prefixes, relative to the working directory, absolute, or addresses; those of a glob or group may contain
    wildcards."""
    measure: Literal["weight", "ratio", "epochs"] | None = None
    """Meaning of `amount`: share of the samples, share per token, or epochs; None for all samples once."""
    amount: float = 1.0
    """At least 0."""
    divide: Literal["tokens", "equally"] = "tokens"
    """Rule that divides a weight among the datasets of a glob."""
    max_epochs: float | None = None
    """Maximum number of epochs in training, above 0; None for no limit."""
    incomplete: Literal["error", "skip"] = "error"
    """Treatment of a `.bin` without its `.idx`, or the reverse, among the matches of a pattern."""
    repeated: bool = False
    """True if its pairs may occur in earlier datasets, or several times in it."""
    packed: bool = True
    """In the order "packed", False if its samples are consecutive documents."""
    splits: tuple[Split, ...] | None = None
    """Splits that it belongs to as a whole; None if the file divides every dataset."""
    where: KeyPath = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry:
    """One `[[stage]]`."""

    first_sample: int
    weights: tuple[tuple[str, float], ...]
    """Names of datasets and their weights, each at least 0; other datasets have weight 0."""
    ramp: int = 0
    """Samples within which the shares change from those before the stage; 0 for at once."""
    where: KeyPath = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEntry:
    """Number of samples of each split; None if the file does not give it."""

    train: int | None = None
    valid: int | None = None
    test: int | None = None

    def of(self, split: Split) -> int | None:
        """Number of samples of one split."""
        return (self.train, self.valid, self.test)[split.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerEntry:
    """`[tokenizer]`: a file, or the properties of a tokenizer that is not available here."""

    file: str | None = None
    """Name of a tokenizer, as for `trackbed.datasets.open_tokenizer`."""
    eod_token: str | None = None
    pad_token: str | None = None
    lower_case: bool = False
    """True for a WordPiece vocabulary of lower-case text."""
    eod: int | None = None
    """Id of the end-of-document token; with `vocab_size`, replaces a file."""
    pad: int | None = None
    vocab_size: int | None = None
    megatron: MegatronIdentity | None = None
    """Identity of the tokenizer in a Megatron job that shares the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendFile:
    """Contents of a blend file."""

    path: Path
    seed: int
    sequence_length: int
    order: OrderName
    split: str | None
    """Shares of training, validation and test in every dataset; None if datasets belong to splits as a whole."""
    cache: str | None
    tokenizer: TokenizerEntry | None
    sizes: SizeEntry
    datasets: tuple[DatasetEntry, ...]
    stages: tuple[StageEntry, ...]
    options: Mapping[str, Any]
    """Other fields of `GPTDatasetConfig`, by name."""
    lines: Mapping[KeyPath, int] = field(repr=False, compare=False)
    schedule: tuple[Stage, ...] | None = None
    """Stages that replace those of the file, with the weights of all datasets of training, where a run has changed
    them; None for those of the file."""

    @property
    def is_computed(self) -> bool:
        """True for an order without an index: samples are computed on each access."""
        return self.order in COMPUTED

    @property
    def dataset_class(self) -> "type[GPTDataset]":
        """Class of the blended datasets: `GPTDataset`."""
        from trackbed.datasets.gpt.dataset import GPTDataset  # imports torch, which a plan does not need

        return GPTDataset

    @property
    def storage(self) -> ObjectStorageConfig | None:
        """Options for pairs in object stores; None if the file names none."""
        if not any(is_address(pattern) for entry in self.datasets for pattern in entry.patterns):
            return None
        return ObjectStorageConfig(self.options.get("object_storage_cache_path") or default_idx_cache())

    def with_idx_cache(self, folder: str | None) -> "BlendFile":
        """Returns a copy with another folder of copies of `.idx` objects; with None, the file's own."""
        return self if folder is None else replace(self, options={**self.options, "object_storage_cache_path": folder})

    def with_train_samples(self, num_samples: int) -> "BlendFile":
        """Returns a copy with another size of training, at least 1."""
        return replace(self, sizes=replace(self.sizes, train=num_samples))

    def problems(self) -> Problems:
        """Creates an empty collection for the problems found in the data."""
        return Problems(self.path, self.lines)
