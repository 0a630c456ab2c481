"""Abstract base class of tokenizers, with Megatron Core's names."""

import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt


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
