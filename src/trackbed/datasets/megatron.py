"""What all datasets over one low-level dataset have in common: their identity and their padding id."""

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch.utils.data

from trackbed.cache import fingerprint
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.description import describe, fields_of, md5_of
from trackbed.datasets.start import shared
from trackbed.errors import ArgumentError
from trackbed.index.splits import Split

__all__ = ["LowLevelDataset", "MegatronDataset", "description_now", "padding_id"]

LowLevelDataset = Any
"""What samples are made of: an `IndexedDataset`, or whatever a subclass's hooks understand."""

_OWN: Final = ("class", "dataset_path", "num_samples", "index_split")
_DECIDED_ELSEWHERE: Final = ("split", "split_matrix")  # which documents it has says the same
_NO_PADDING_ID: Final = -1  # no token has it

# torch's Dataset is generic; one without a parameter is what Megatron Core's classes are.
_Dataset = torch.utils.data.Dataset[Any]


class MegatronDataset(ABC, _Dataset):
    """Base of every dataset that the builder can make.

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix, for bookkeeping.
        indices: `[D]` the elements of it that belong to this split.
        num_samples: samples to give at least, or None for one epoch.
        index_split: which split this is.
        config: what decides the samples.
    """

    _ORDERS: ClassVar[tuple[str, ...]] = ("megatron", "balanced")
    """The orders that a class of datasets supports."""

    def __init__(
        self,
        dataset: LowLevelDataset,
        dataset_path: str | None,
        indices: npt.NDArray[np.integer[Any]],
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        if config.order not in self._ORDERS:
            msg = f"{type(self).__name__} must be built with order {' or '.join(self._ORDERS)}, found {config.order!r}"
            raise ArgumentError(msg)
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config

        self._identity = (type(self).__name__, dataset_path, num_samples, index_split.name)
        names = self._key_config_attributes()
        values = [getattr(config, name) for name in names]
        self._options = shared("options", lambda: _Options(names, values), *names, *values)
        self._pad_token_id = shared(
            "padding",
            lambda: padding_id(config.tokenizer, allow_ambiguous=bool(config.allow_ambiguous_pad_tokens)),
            config.tokenizer,
            config.allow_ambiguous_pad_tokens,
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Elements of the low-level dataset that the split is made over."""
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> LowLevelDataset:
        """Open the low-level dataset at a prefix."""
        raise NotImplementedError

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Fields of the configuration that belong to the dataset's identity."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def _identifiers(self) -> "OrderedDict[str, Any]":
        """What tells it from others, as it was when it was made."""
        return OrderedDict(chain(zip(_OWN, self._identity, strict=True), self._options.named))

    @cached_property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """What tells it from others. A subclass may add to it; of thousands of datasets, nobody asks most."""
        return self._identifiers()

    @cached_property
    def unique_description(self) -> str:
        """What it is, as it was when it was made, in Megatron Core's words; no start that recalls its cache asks."""
        if not self._options.are_distinct:
            return describe(self._identifiers().items())
        return f"{{\n{fields_of(zip(_OWN, self._identity, strict=True))},\n{self._options.fields}\n}}"

    @cached_property
    def unique_description_hash(self) -> str:
        """The md5 of the description, which names its files."""
        return md5_of(self.unique_description)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the samples."""
        return fingerprint({"description": self.unique_description})

    @property
    def content_key(self) -> str:
        """Text that is the same for two datasets if and only if their `content` is."""
        return f"{type(self).__name__} {self.index_split.name} {self.num_samples} {self._options.content_key}"

    def content(self) -> dict[str, Any]:
        """What decides the samples, by name, but for the folders that files lie in: copies of a corpus are the same."""
        own = {"class": type(self).__name__, "split": self.index_split.name, "num_samples": self.num_samples}
        return {**own, **self._options.content}

    def can_give(self, num_samples: int) -> bool:
        """Whether there are so many samples."""
        return num_samples <= len(self)

    @abstractmethod
    def __len__(self) -> int:
        """Samples in the dataset."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, torch.Tensor | npt.NDArray[Any]]:
        """One sample."""


class _Options:
    """What a dataset takes from its configuration, as that was when it was made.

    Args:
        names: of what belongs to its identity.
        values: one for each.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self.named = list(zip(names, values, strict=True))
        self.are_distinct = len(names) > 0 and len({*_OWN, *names}) == len(_OWN) + len(names)
        """Whether there are some, each with a name of its own; a subclass may name one twice."""

    @cached_property
    def fields(self) -> str:
        """What stands for them in a description."""
        return fields_of(self.named)

    @cached_property
    def content(self) -> dict[str, Any]:
        """Those that decide samples, by name, without the folders that files of a tokenizer lie in."""
        content = {name: value for name, value in self.named if name not in _DECIDED_ELSEWHERE}
        if "tokenizer" in content:
            identifiers = getattr(content["tokenizer"], "unique_identifiers", None) or {}
            content["tokenizer"] = {name: value for name, value in identifiers.items() if "path" not in name}
        return content

    @cached_property
    def content_key(self) -> str:
        """The same for options of equal content."""
        return fields_of(self.content.items())


def description_now(dataset: MegatronDataset) -> str:
    """The description of a dataset, whose class may have changed `unique_identifiers` after it was first made."""
    if "unique_identifiers" not in vars(dataset):
        return dataset.unique_description
    return describe(dataset.unique_identifiers.items())


def padding_id(tokenizer: Any, *, allow_ambiguous: bool) -> int:
    """Id that fills up short samples: the tokenizer's, or -1 where it has none of its own.

    Args:
        tokenizer: may lack `pad`, `special_tokens_dict` and `eos`.
        allow_ambiguous: whether an id that another special token has too is used all the same.
    """
    try:
        pad = tokenizer.pad
    except Exception:  # noqa: BLE001  tokenizers say in many ways that they have none
        pad = None
    if pad is None:
        return _NO_PADDING_ID
    if pad not in _other_special_ids(tokenizer):
        return int(pad)
    consequence = "it is masked out all the same" if allow_ambiguous else "padding is left in the loss"
    warnings.warn(
        f"the padding id {pad} must not be another special token's, found it to be one; {consequence}: "
        "give the tokenizer a padding token of its own",
        stacklevel=6,
    )
    return int(pad) if allow_ambiguous else _NO_PADDING_ID


def _other_special_ids(tokenizer: Any) -> list[Any]:
    try:
        listed = [value for name, value in tokenizer.special_tokens_dict.items() if name != "pad_token"]
    except (AttributeError, IndexError, ValueError):
        listed = []
    if listed:
        return listed
    found = []
    for name in ("eos", "eod"):
        try:
            found.append(getattr(tokenizer, name))
        except (AttributeError, NotImplementedError):
            continue
    return found
