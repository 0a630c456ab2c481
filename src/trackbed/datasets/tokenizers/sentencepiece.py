"""Tokenizer from a SentencePiece model."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.datasets.extras import require
from trackbed.datasets.tokenizers.base import Adapter, MegatronIdentity
from trackbed.datasets.tokenizers.other_files import describe_other, missing_tokenizer
from trackbed.datasets.tokenizers.special_tokens import end_of_document, no_end_of_document, usual_roles
from trackbed.errors import ArgumentError


class SentencePieceTokenizer(Adapter):
    """Tokenizer from a model file of SentencePiece (`.model`).

    Control symbols written out in a text are tokenised as plain text; user-defined symbols are pieces of their own.
    The model states the ids of `bos`, `eos` and `pad`; `cls`, `sep` and `mask` are the control or user-defined symbols
    with the usual names, such as `<cls>`. `additional_special_tokens_ids` are the user-defined symbols.

    Args:
        path: the model.
        eod_token: piece that ends a document; by default the model's end of a sentence, or else a control or
            user-defined symbol with a usual name, such as `<|endoftext|>`.
        pad_token: piece that pads short samples; by default the model's padding.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    Raises:
        ArgumentError: SentencePiece is not installed, the file is not one of its models, or lacks the piece.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        eod_token: str | None = None,
        pad_token: str | None = None,
        megatron_identity: MegatronIdentity | None = None,
    ) -> None:
        super().__init__(str(path), megatron_identity=megatron_identity, eod_token=eod_token, pad_token=pad_token)
        self._path = str(path)
        self._model = _load(Path(path))
        self._eod = None if eod_token is None else self._find(eod_token)
        self._pad = int(self._model.pad_id()) if pad_token is None else self._find(pad_token)

    def tokenize(self, text: str) -> npt.NDArray[np.int64]:
        """Returns `[T]` token ids of a text."""
        return np.array(self._model.encode(text), dtype=np.int64)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, on one core."""
        found: list[list[int]] = self._model.encode(list(texts), num_threads=1)
        return found

    @property
    def fingerprint(self) -> str:
        """String that changes when the ids change: SHA-256 of the model."""
        return hashlib.sha256(self._model.serialized_model_proto()).hexdigest()

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        """Returns the text of token ids; the model may have normalised it.

        Raises:
            ArgumentError: an id is out of range.
        """
        numbers = np.asarray(ids).tolist()
        self._check_range(numbers)
        return str(self._model.decode(numbers))

    def _check_range(self, ids: list[int]) -> None:
        wrong = next((index for index in ids if not 0 <= index < self.vocab_size), None)
        if wrong is not None:
            raise ArgumentError(f"{self._path}: ids must be in [0, {self.vocab_size}), found {wrong}")

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Returns the character of the text at which each of the ids begins.

        Args:
            ids: ids of the text, or any other ids that decode to it.
            text: the text.

        Raises:
            ArgumentError: the ids are not those of the text, and do not decode to it, or are out of range.
        """
        found = self._model.encode(text, return_type="offset_mapping")
        if found["ids"] != list(ids):
            self._check_range(ids)
            found = self._model.decode(list(ids), return_type="offset_mapping")
            if found["text"] != text:
                self._check_own(ids, [], text)
        return [start for start, _ in found["offsets"]]

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Id of each piece. Built on first use."""
        return {piece: index for index, piece in self.inv_vocab.items()}

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Piece of each id. Built on first use."""
        return {index: self._model.id_to_piece(index) for index in range(self.vocab_size)}

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return int(self._model.get_piece_size())

    @property
    def unknown_id(self) -> int:
        """Id of text that the vocabulary does not cover."""
        return int(self._model.unk_id())

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        if self._eod is None:
            end = int(self._model.eos_id())
            self._eod = end if end >= 0 else end_of_document(self._symbol, usual_roles(self._symbol))
            if self._eod is None:
                symbols = filter(lambda piece: self._symbol(piece) is not None, self.vocab)
                raise ArgumentError(f"{self._path}: {no_end_of_document(symbols, self._index)}")
        return self._eod

    @cached_property
    def _roles(self) -> Mapping[str, int]:
        stated = {"bos": int(self._model.bos_id()), "eos": int(self._model.eos_id()), "pad": self._pad}
        named = usual_roles(self._symbol)
        return {
            **{role: index for role, index in named.items() if role not in stated},
            **{role: index for role, index in stated.items() if index >= 0},
        }

    @cached_property
    def _additional(self) -> list[int]:
        return user_defined_ids(self._model.serialized_model_proto())

    def _symbol(self, piece: str) -> int | None:
        """Returns the id of a control or user-defined symbol; None if there is none of this name."""
        index = self._index(piece)
        return index if index is not None and (self._model.is_control(index) or index in self._additional) else None

    def _index(self, piece: str) -> int | None:
        index = int(self._model.piece_to_id(piece))
        # A missing piece has the id of the unknown piece.
        return index if index >= 0 and self._model.id_to_piece(index) == piece else None

    def _find(self, piece: str) -> int:
        index = self._index(piece)
        if index is None:
            raise ArgumentError(f"{self._path}: the model must have one of the pieces {piece!r}, found none")
        return index


def _load(path: Path) -> Any:
    library = require("sentencepiece", where=path)
    if not path.is_file():
        raise ArgumentError(missing_tokenizer(path))
    raw = path.read_bytes()
    if not raw:
        raise ArgumentError(f"{path}: must be a model of SentencePiece, found an empty file")
    try:
        return library.SentencePieceProcessor(model_proto=raw)
    except RuntimeError as error:
        other = describe_other(path)
        raise ArgumentError(
            f"{path}: must be a model of SentencePiece: {error if other is None else f'found {other}'}"
        ) from error


_PIECE: Final = 1
_TYPE: Final = 3
_USER_DEFINED: Final = 4
_VARINT, _EIGHT_BYTES, _MESSAGE = 0, 1, 2
_FIXED_BYTES: Final = {_EIGHT_BYTES: 8, 5: 4}


def user_defined_ids(model: bytes) -> list[int]:
    r"""Returns the ids of the user-defined pieces of a model that the library has read, in order.

    >>> user_defined_ids(b"\x0a\x03\x0a\x01a" + b"\x0a\x05\x0a\x01b\x18\x04")
    [1]
    """
    pieces = (value for field, value in _fields(model) if field == _PIECE and isinstance(value, bytes))
    return [index for index, piece in enumerate(pieces) if (_TYPE, _USER_DEFINED) in _fields(piece)]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and value of each field: an integer, or bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield field, value
            continue
        size = _FIXED_BYTES.get(kind, 0)
        if kind == _MESSAGE:
            size, position = _varint(message, position)
        yield field, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
