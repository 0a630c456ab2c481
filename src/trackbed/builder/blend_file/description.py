"""What a blend file says, as frozen values (docs/formats/blend-file.md). Nothing here has looked at the data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trackbed.builder.blend_file.positions import KeyPath
from trackbed.builder.blend_file.tables import Problems
from trackbed.datasets.adapters import MegatronIdentity
from trackbed.index.splits import Split

__all__ = ["BlendFile", "DatasetEntry", "SizeEntry", "StageEntry", "TokenizerEntry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """One `[[dataset]]`."""

    name: str
    kind: Literal["path", "glob", "group"]
    """A pair, pairs that are datasets of their own, or pairs that are one dataset."""
    patterns: tuple[str, ...]
    """Prefixes, relative to the working directory or absolute; those of a glob or group may have wildcards."""
    measure: Literal["weight", "ratio", "epochs"] | None = None
    """What `amount` is: a share of samples, a share of samples for each token, epochs; None for all samples once."""
    amount: float = 1.0
    """At least 0."""
    divide: Literal["tokens", "equally"] = "tokens"
    """How a weight is divided among the datasets of a glob."""
    max_epochs: float | None = None
    """Epochs that the dataset may give to training, above 0; None for any number."""
    incomplete: Literal["error", "skip"] = "error"
    """What becomes of a `.bin` without its `.idx`, or the reverse, among the matches of a pattern."""
    splits: tuple[Split, ...] | None = None
    """The splits that it belongs to as a whole; None where the file divides every dataset."""
    where: KeyPath = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntry:
    """One `[[stage]]`."""

    first_sample: int
    weights: tuple[tuple[str, float], ...]
    """Names of datasets with their weights, each at least 0; those left out have the weight 0."""
    where: KeyPath = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEntry:
    """Samples of each split; None where the file does not say."""

    train: int | None = None
    valid: int | None = None
    test: int | None = None

    def of(self, split: Split) -> int | None:
        """Samples of one split."""
        return (self.train, self.valid, self.test)[split.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerEntry:
    """`[tokenizer]`: a file, or what datasets must know of a tokenizer that is elsewhere."""

    file: str | None = None
    """A file of Hugging Face `tokenizers`, or "bytes"."""
    eod_token: str | None = None
    pad_token: str | None = None
    eod: int | None = None
    """Id that ends a document; with `vocab_size`, in place of a file."""
    pad: int | None = None
    vocab_size: int | None = None
    megatron: MegatronIdentity | None = None
    """What the tokenizer is called in a Megatron job that is to share the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendFile:
    """What a blend file says."""

    path: Path
    seed: int
    sequence_length: int
    order: str
    split: str | None
    """Shares of training, validation and test in every dataset; None where datasets belong to splits as a whole."""
    cache: str | None
    tokenizer: TokenizerEntry | None
    sizes: SizeEntry
    datasets: tuple[DatasetEntry, ...]
    stages: tuple[StageEntry, ...]
    options: Mapping[str, Any]
    """Other fields of `GPTDatasetConfig`, by name."""
    lines: Mapping[KeyPath, int] = field(repr=False, compare=False)

    @property
    def dataset_class(self) -> Any:
        """The class of the datasets that are blended: `GPTDataset`."""
        from trackbed.datasets.gpt import GPTDataset  # torch, which a plan does without

        return GPTDataset

    def with_train_samples(self, num_samples: int) -> "BlendFile":
        """The same with another size of training, at least 1."""
        return replace(self, sizes=replace(self.sizes, train=num_samples))

    def problems(self) -> Problems:
        """Takes what turns out to be wrong when the data is looked at."""
        return Problems(self.path, self.lines)
