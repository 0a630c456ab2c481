"""Base class of datasets over one low-level dataset: identity, description and padding id.

Descriptions are written as Megatron Core writes them; their MD5 names the index files.
"""

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Sized
from functools import cached_property, lru_cache
from itertools import chain
from types import NoneType
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch.utils.data

from trackbed.cache import fingerprint
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.low_level import name_of
from trackbed.datasets.start import shared
from trackbed.errors import ArgumentError
from trackbed.index.splits import Split
from trackbed.plural import number_of

_QUOTE: Final = json.encoder.encode_basestring_ascii
_COMPACT: Final = json.JSONEncoder(default=lambda value: value.unique_identifiers).encode


def describe(identifiers: Iterable[tuple[str, Any]]) -> str:
    """Returns the description that Megatron Core writes for these identifiers, given as name and value.

    Equals `json.dumps(dict(identifiers), indent=4, default=...)`, but is joined from fields: thousands of datasets
    share most values, and indented JSON is slow to write.
    """
    fields = fields_of(identifiers)
    return f"{{\n{fields}\n}}" if fields else "{}"


def fields_of(identifiers: Iterable[tuple[str, Any]]) -> str:
    """Returns the lines of a description for these identifiers, without the enclosing braces."""
    return ",\n".join([f"    {_QUOTE(name)}: {_words_of(value)}" for name, value in identifiers])


def md5_of(description: str) -> str:
    """Returns the MD5 of a description, which names the index files."""
    return hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()


def _words_of(value: Any) -> str:
    if type(value) is str:
        return _QUOTE(value)
    if type(value) is int:
        return repr(value)
    if isinstance(value, (str, int, float, NoneType)):
        return json.dumps(value)
    return shared("words", lambda: _indented(_COMPACT(value)), value)


@lru_cache(maxsize=256)
def _indented(text: str) -> str:
    """Returns a JSON text, indented as a value inside an object."""
    return json.dumps(json.loads(text), indent=4).replace("\n", "\n    ")


def describe_blend(identifiers: "OrderedDict[str, Any]") -> str:
    """Returns the description of a blend, whose `datasets` are given as the descriptions of its members.

    A nested description is the same text, indented: encoding thousands of them again would take longer than building
    the indices.
    """
    members = ",".join("\n        " + text.replace("\n", "\n        ") for text in identifiers["datasets"])
    text = describe({**identifiers, "datasets": []}.items())
    return text.replace('"datasets": []', f'"datasets": [{members}\n    ]', 1)


LowLevelDataset = Any
"""Source of samples: an `IndexedDataset`, or any object that the hooks of a subclass accept."""

_OWN: Final = ("class", "dataset_path", "num_samples", "index_split")
_DECIDED_ELSEWHERE: Final = ("split", "split_matrix")  # represented by the documents of the split
_NO_PADDING_ID: Final = -1  # no token has it

# torch's Dataset is generic; Megatron Core's classes inherit from it without a parameter.
_Dataset = torch.utils.data.Dataset[Any]


def samples_text(dataset: Sized, config: BlendedMegatronDatasetConfig) -> str:
    """Returns the number and length of the samples of a dataset; without the number if that cannot be determined."""
    try:
        number = number_of(len(dataset), "sample")
    except Exception:  # noqa: BLE001  a repr does not raise, and indices may be damaged or not there yet
        number = "samples"
    return f"{number} of {number_of(config.sequence_length, 'token')}"


class MegatronDataset(ABC, _Dataset):
    """Base class of the datasets that the builder constructs.

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix, for descriptions and errors.
        indices: `[D]` elements of it that belong to this split.
        num_samples: lowest number of samples, or None for one epoch.
        index_split: the split.
        config: configuration of the samples.
    """

    _ORDERS: ClassVar[tuple[str, ...]] = ("megatron", "balanced")
    """Orders that the class supports."""

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
            raise ArgumentError(
                f"{type(self).__name__} must be built with order {' or '.join(self._ORDERS)}, found {config.order!r}"
            )
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config

        self._identity = (type(self).__name__, dataset_path, num_samples, index_split.name)
        names = self._key_config_attributes()
        values = [getattr(config, name) for name in names]
        self._options = shared("options", lambda: _IdentityOptions(names, values), *names, *values)
        # Of packs, borders say what is padding, so that a token of the text may have the id of padding.
        self._pad_token_id = (
            _NO_PADDING_ID
            if config.order == "packed"
            else shared(
                "padding",
                lambda: padding_id(config.tokenizer, allow_ambiguous=bool(config.allow_ambiguous_pad_tokens)),
                config.tokenizer,
                config.allow_ambiguous_pad_tokens,
            )
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Returns the number of elements in the low-level dataset, which are divided among the splits."""
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> LowLevelDataset:
        """Opens the low-level dataset at a prefix."""
        raise NotImplementedError

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Returns the names of the configuration fields that belong to the dataset's identity."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def _identifiers(self) -> "OrderedDict[str, Any]":
        """Returns the identifiers as of construction."""
        return OrderedDict(chain(zip(_OWN, self._identity, strict=True), self._options.named))

    @cached_property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Identifiers of the dataset; a subclass may add to them. Computed on first use."""
        return self._identifiers()

    @cached_property
    def unique_description(self) -> str:
        """Description as of construction, as written by Megatron Core. Computed on first use."""
        if not self._options.are_distinct:
            return describe(self._identifiers().items())
        return f"{{\n{fields_of(zip(_OWN, self._identity, strict=True))},\n{self._options.fields}\n}}"

    @cached_property
    def unique_description_hash(self) -> str:
        """MD5 of the description, which names the index files."""
        return md5_of(self.unique_description)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the samples."""
        return fingerprint({"description": self.unique_description})

    @property
    def agreed_key(self) -> str:
        """Text that is equal for two datasets if and only if their `agreed_values` are."""
        named = f"{name_of(self.dataset, self.dataset_path)} {type(self).__name__} {self.index_split.name}"
        return f"{named} {self.num_samples} {self._options.key}"

    def agreed_values(self) -> dict[str, Any]:
        """Returns the values, by name, that ranks must agree on, without folders: copies of a corpus are equal."""
        own: dict[str, Any] = {"name": name_of(self.dataset, self.dataset_path), "class": type(self).__name__}
        own |= {"split": self.index_split.name, "num_samples": self.num_samples}
        return {**own, **self._options.values}

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples."""
        return num_samples <= len(self)

    def __repr__(self) -> str:
        """Says what the dataset holds."""
        where = "" if self.dataset_path is None else f", from {self.dataset_path}"
        return f"<{type(self).__name__}: {self.index_split.name}, {samples_text(self, self.config)}{where}>"

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples in the dataset."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, torch.Tensor | npt.NDArray[Any]]:
        """Returns one sample."""


class _IdentityOptions:
    """Configuration fields that belong to a dataset's identity, with their values as of construction."""

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self.named = list(zip(names, values, strict=True))
        self.are_distinct = len(names) > 0 and len({*_OWN, *names}) == len(_OWN) + len(names)
        """True if there are fields and all names are unique; a subclass may list a name twice."""

    def __getstate__(self) -> dict[str, Any]:
        """Copy of the state: another thread may compute a property meanwhile."""
        return vars(self).copy()

    @cached_property
    def fields(self) -> str:
        """Lines of a description for these fields."""
        return fields_of(self.named)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Fields that decide the samples, by name, without paths of tokenizer files."""
        values = {name: value for name, value in self.named if name not in _DECIDED_ELSEWHERE}
        if "tokenizer" in values:
            identifiers = getattr(values["tokenizer"], "unique_identifiers", None) or {}
            values["tokenizer"] = {name: value for name, value in identifiers.items() if "path" not in name}
        return values

    @cached_property
    def key(self) -> str:
        """Text that is equal for options of equal values."""
        return fields_of(self.values.items())


def description_now(dataset: MegatronDataset) -> str:
    """Returns the description of a dataset, including changes of its class to `unique_identifiers`."""
    if "unique_identifiers" not in vars(dataset):
        return dataset.unique_description
    return describe(dataset.unique_identifiers.items())


def padding_id(tokenizer: Any, *, allow_ambiguous: bool) -> int:
    """Returns the id that pads short samples: the tokenizer's, or -1 if it has none of its own.

    Args:
        tokenizer: may lack `pad`, `special_tokens_dict` and `eos`.
        allow_ambiguous: True to use the padding id even if it is also the id of another special token.
    """
    try:
        pad = tokenizer.pad
    except Exception:  # noqa: BLE001  tokenizers without a padding id raise various errors
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
