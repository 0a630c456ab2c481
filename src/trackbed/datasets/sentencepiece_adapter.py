"""Tokenizer from a SentencePiece model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.datasets.adapters import END_OF_DOCUMENT_TOKENS
from trackbed.datasets.extras import require
from trackbed.datasets.tokenizer import MegatronTokenizer
from trackbed.errors import ArgumentError

__all__ = ["SentencePieceTokenizer"]


class SentencePieceTokenizer(MegatronTokenizer):
    """Tokenizer from a model file of SentencePiece (`.model`).

    Control symbols written out in a text are tokenised as plain text.

    Args:
        path: the model.
        eod_token: piece that ends a document; by default the model's end of a sentence, or else the first of
            `END_OF_DOCUMENT_TOKENS` in the vocabulary.

    Raises:
        ArgumentError: SentencePiece is not installed, the file is not one of its models, or lacks the piece.
    """

    def __init__(self, path: str | Path, *, eod_token: str | None = None) -> None:
        options = {} if eod_token is None else {"eod_token": eod_token}
        super().__init__(str(path), **options)
        self._path = str(path)
        self._model = _load(Path(path))
        self._eod = None if eod_token is None else self._find([eod_token])

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
        """Returns the text of token ids; the model may have normalised it."""
        return str(self._model.decode(np.asarray(ids).tolist()))

    @property
    def vocab(self) -> dict[str, int]:
        """Id of each piece."""
        return {piece: index for index, piece in self.inv_vocab.items()}

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Piece of each id."""
        return {index: self._model.id_to_piece(index) for index in range(self.vocab_size)}

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return int(self._model.get_piece_size())

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        if self._eod is None:
            end = int(self._model.eos_id())
            self._eod = end if end >= 0 else self._find(END_OF_DOCUMENT_TOKENS)
        return self._eod

    def _find(self, candidates: Sequence[str]) -> int:
        for piece in candidates:
            index = int(self._model.piece_to_id(piece))
            if self._model.id_to_piece(index) == piece:  # a missing piece has the id of the unknown piece
                return index
        msg = f"{self._path}: the model must have one of the pieces {', '.join(map(repr, candidates))}, found none"
        raise ArgumentError(msg)


def _load(path: Path) -> Any:
    library = require("sentencepiece", where=path)
    if not path.is_file():
        msg = f"{path}: a tokenizer file must exist, found none"
        raise ArgumentError(msg)
    try:
        return library.SentencePieceProcessor(model_proto=path.read_bytes())
    except RuntimeError as error:
        msg = f"{path}: must be a model of SentencePiece: {error}"
        raise ArgumentError(msg) from error
