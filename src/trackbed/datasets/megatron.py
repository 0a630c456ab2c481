"""What all datasets over one low-level dataset have in common: their identity and their padding id."""

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache
from types import NoneType
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch.utils.data

from trackbed.cache import fingerprint
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.errors import ArgumentError
from trackbed.index.splits import Split

__all__ = [
    "LowLevelDataset",
    "MegatronDataset",
    "describe",
    "describe_blend",
    "describing_alike",
    "description_now",
    "md5_of",
    "padding_id",
]

LowLevelDataset = Any
"""What samples are made of: an `IndexedDataset`, or whatever a subclass's hooks understand."""

_QUOTE: Final = json.encoder.encode_basestring_ascii
_COMPACT: Final = json.JSONEncoder(default=lambda value: value.unique_identifiers).encode
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

        options = [getattr(config, name) for name in self._key_config_attributes()]
        self._identity = (type(self).__name__, dataset_path, num_samples, index_split.name, *options)
        self._pad_token_id = padding_id(config.tokenizer, allow_ambiguous=bool(config.allow_ambiguous_pad_tokens))

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

    def _identifiers(self) -> Iterable[tuple[str, Any]]:
        """What tells it from others, as it was when it was made."""
        names = ("class", "dataset_path", "num_samples", "index_split", *self._key_config_attributes())
        return zip(names, self._identity, strict=True)

    @cached_property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """What tells it from others. A subclass may add to it; of thousands of datasets, nobody asks most."""
        return OrderedDict(self._identifiers())

    @cached_property
    def unique_description(self) -> str:
        """What it is, as it was when it was made, in Megatron Core's words; no start that recalls its cache asks."""
        return describe(OrderedDict(self._identifiers()).items())  # a subclass may name an option twice

    @cached_property
    def unique_description_hash(self) -> str:
        """The md5 of the description, which names its files."""
        return md5_of(self.unique_description)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the samples."""
        return fingerprint({"description": self.unique_description})

    def can_give(self, num_samples: int) -> bool:
        """Whether there are so many samples."""
        return num_samples <= len(self)

    @abstractmethod
    def __len__(self) -> int:
        """Samples in the dataset."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, torch.Tensor | npt.NDArray[Any]]:
        """One sample."""


_ALIKE: ContextVar[dict[int, tuple[Any, str]] | None] = ContextVar("alike", default=None)


@contextmanager
def describing_alike() -> Iterator[None]:
    """Inside the block nobody changes what datasets share, such as a tokenizer: each is put into words once."""
    token = _ALIKE.set({})
    try:
        yield
    finally:
        _ALIKE.reset(token)


def describe(identifiers: Iterable[tuple[str, Any]]) -> str:
    """The description that Megatron Core writes of these identifiers, by name.

    It is `json.dumps(dict(identifiers), indent=4, default=...)`, put together by field: thousands of datasets share
    most values, and indented JSON is slow to write.
    """
    fields = ",\n".join([f"    {_QUOTE(name)}: {_describe_value(value)}" for name, value in identifiers])
    return f"{{\n{fields}\n}}" if fields else "{}"


def md5_of(description: str) -> str:
    """What names the files of whatever is described so."""
    return hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()


def _describe_value(value: Any) -> str:
    if type(value) is str:
        return _QUOTE(value)
    if type(value) is int:
        return repr(value)
    if isinstance(value, (str, int, float, NoneType)):
        return json.dumps(value)
    alike = _ALIKE.get()
    if alike is None:
        return _indented(_COMPACT(value))
    if id(value) not in alike:
        alike[id(value)] = value, _indented(_COMPACT(value))  # kept, so that no other value takes its number
    return alike[id(value)][1]


@lru_cache(maxsize=256)
def _indented(text: str) -> str:
    """A JSON text, spread over lines as it is inside an object."""
    return json.dumps(json.loads(text), indent=4).replace("\n", "\n    ")


def description_now(dataset: MegatronDataset) -> str:
    """The description of a dataset, whose class may have changed `unique_identifiers` after it was first made."""
    if "unique_identifiers" not in vars(dataset):
        return dataset.unique_description
    return describe(dataset.unique_identifiers.items())


def describe_blend(identifiers: "OrderedDict[str, Any]") -> str:
    """`describe` for a blend, whose `datasets` are given as the descriptions that their members have already.

    A description inside another one is the same text, indented: to write thousands of them twice would take
    longer than to build what they describe.
    """
    members = ",".join("\n        " + text.replace("\n", "\n        ") for text in identifiers["datasets"])
    text = describe({**identifiers, "datasets": []}.items())
    return text.replace('"datasets": []', f'"datasets": [{members}\n    ]', 1)


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
        stacklevel=4,
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
