"""Base classes of tokenizers: Megatron Core's interface, and what the tokenizers of this package share.

They share identity, special tokens, and copies for other processes.
"""

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from trackbed.datasets.megatron_releases import check_release
from trackbed.errors import ArgumentError


class MegatronTokenizer(ABC):
    """Base of tokenizers, with the identifiers that enter the names of cached indices.

    Datasets use only `eod`, `pad`, `vocab_size` and `unique_identifiers`, and accept any object that has these.

    Args:
        tokenizer_paths: paths that the tokenizer was read from.
        tokenizer_options: other options that decide its ids.
    """

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["tokenizer_path"] = list(tokenizer_paths)
        for name, option in tokenizer_options.items():
            self.unique_identifiers[name] = str(option)
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    @abstractmethod
    def tokenize(self, text: str) -> npt.NDArray[Any]:
        """Returns `[T]` token ids of a text."""

    @property
    @abstractmethod
    def vocab(self) -> dict[str, int]:
        """Id of each token."""

    @property
    @abstractmethod
    def inv_vocab(self) -> dict[int, str]:
        """Token of each id."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        """Returns the text of `[T]` token ids. Optional."""
        self._lacks("detokenize")

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Returns the character of the text at which each of the ids begins. Optional."""
        self._lacks("offsets")

    @property
    def cls(self) -> int:
        """Id of the classification token. Optional."""
        self._lacks("cls")

    @property
    def sep(self) -> int:
        """Id of the separator. Optional."""
        self._lacks("sep")

    @property
    def pad(self) -> int:
        """Id that pads short samples. Optional."""
        self._lacks("pad")

    @property
    def eod(self) -> int:
        """Id that ends a document. Optional."""
        self._lacks("eod")

    @property
    def bos(self) -> int:
        """Id that begins a text. Optional."""
        self._lacks("bos")

    @property
    def eos(self) -> int:
        """Id that ends a text. Optional."""
        self._lacks("eos")

    @property
    def mask(self) -> int:
        """Id that stands for a masked token. Optional."""
        self._lacks("mask")

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the special tokens without a role of their own, such as the sentinels of T5. Optional."""
        self._lacks("additional_special_tokens_ids")

    def _lacks(self, name: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {name!r}")


_TOKENIZER_CLASS: Final = "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText"
_REBUILT: Final = ("vocab", "inv_vocab")  # built on first use, and left out of copies for other processes


@dataclass(frozen=True, slots=True)
class MegatronIdentity:
    """Identity of a tokenizer of Megatron Core, as it appears in the names of cached indices.

    A real Megatron job finds an index only if its tokenizer has the identity with which the index was built.
    """

    class_path: str
    """Module and class, for instance of `DefaultTokenizerText` in megatron-core 0.16.1."""
    path: str | None = None
    """Path given to `MegatronTokenizer.from_pretrained`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments given to `from_pretrained`, in their order."""

    @classmethod
    def of(cls, release: str, path: str | None = None, options: Mapping[str, Any] | None = None) -> Self:
        """Returns the identity of a tokenizer that `MegatronTokenizer.from_pretrained` makes in a release.

        Args:
            release: release of Megatron Core, such as "0.19", from 0.16 on.
            path: the path that it is given; None for a `NullTokenizer`.
            options: the keyword arguments that it is given, in their order.

        Raises:
            ArgumentError: it is no release, or an older one.
        """
        check_release(release)
        return cls(_TOKENIZER_CLASS, path, options or {})

    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Returns the identifiers that Megatron Core hashes."""
        named = {name: str(value) for name, value in self.options.items()}
        return OrderedDict([("class", self.class_path), ("tokenizer_path", self.path), *named.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAs:
    """Name and options with which a tokenizer was opened, so that another host can open the same one."""

    name: str
    lower_case: bool
    eod_token: str | None
    special_tokens: bool


class Adapter(MegatronTokenizer):
    """Base of the tokenizers of this package.

    Args:
        paths: paths that the tokenizer was read from.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache, which replaces its own.
        options: other options that decide its ids; those that are None are left out of the identity.
    """

    opened_as: OpenedAs | None = None
    """Name and options that `open_tokenizer` was called with; None if the tokenizer was not opened by name."""

    def __init__(self, *paths: str, megatron_identity: MegatronIdentity | None, **options: Any) -> None:
        super().__init__(*paths, **{name: value for name, value in options.items() if value is not None})
        if megatron_identity is not None:
            self.unique_identifiers = megatron_identity.unique_identifiers()
            self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _REBUILT}

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Token of each id, in order of id: random tokens of BERT are drawn by it. Built on first use."""
        return dict(sorted((index, token) for token, index in self.vocab.items()))

    @property
    def special_token_ids(self) -> list[int]:
        """Ids of all special tokens that are known."""
        return sorted({*self._roles.values(), *(self._additional or [])})

    @property
    def byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """Bytes of text, in Unicode's normal form C, that each id stands for; None if that depends on the text.

        Where the lengths of a text's ids do not add up to its own, each stands for other bytes than these.
        """
        return None

    def ranges(self, ids: list[int], text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the character of the text at which each of the ids begins, and the one behind its last.

        Raises:
            ArgumentError: the ids are not those of the text.
            NotImplementedError: the tokenizer has no `offsets`.
        """
        starts = np.array(self.offsets(ids, text), dtype=np.int64)
        behind = np.append(np.unique(starts), len(text))
        return starts, behind[np.searchsorted(behind, starts, side="right")]

    @property
    def unknown_id(self) -> int | None:
        """Id of text that the vocabulary does not cover; None if there is none."""
        return None

    @property
    def bos(self) -> int:
        """Id that begins a text."""
        return self._id_of("bos")

    @property
    def eos(self) -> int:
        """Id that ends a text."""
        return self._id_of("eos")

    @property
    def pad(self) -> int:
        """Id that pads short samples."""
        return self._id_of("pad")

    @property
    def cls(self) -> int:
        """Id of the classification token."""
        return self._id_of("cls")

    @property
    def sep(self) -> int:
        """Id of the separator."""
        return self._id_of("sep")

    @property
    def mask(self) -> int:
        """Id that stands for a masked token."""
        return self._id_of("mask")

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the special tokens without a role of their own, such as the sentinels of T5."""
        if self._additional is None:
            self._lacks("additional_special_tokens_ids")
        return list(self._additional)

    @property
    def _roles(self) -> Mapping[str, int]:
        """Id of each of `ROLES` that the tokenizer has."""
        return {}

    @property
    def _additional(self) -> list[int] | None:
        """Ids of `additional_special_tokens_ids`; None if the kind of tokenizer has none."""
        return None

    def _id_of(self, role: str) -> int:
        found = self._roles.get(role)
        if found is None:
            self._lacks(role)
        return found

    def _check_own(self, ids: list[int], own: list[int], text: str) -> None:
        """Checks that ids are the tokens of a text, whose offsets are asked for."""
        if list(ids) != own:
            raise ArgumentError(f"{type(self).__name__}: offsets needs the ids of the text {text[:40]!r}, found others")
