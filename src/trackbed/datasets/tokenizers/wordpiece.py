"""Tokenizer from a WordPiece vocabulary, as BERT has it."""

import logging
import re
from pathlib import Path
from typing import Final

import tokenizers

from trackbed.datasets.tokenizers.base import MegatronIdentity
from trackbed.datasets.tokenizers.huggingface import LibraryTokenizer, SpecialTokens
from trackbed.datasets.tokenizers.other_files import describe_other, missing_tokenizer
from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors
from trackbed.errors import ArgumentError

logger = logging.getLogger(__name__)

_ROLES: Final = {
    "bos": "[BOS]",
    "eos": "[EOS]",
    "pad": "[PAD]",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
}
_REQUIRED: Final = ("[UNK]", "[CLS]", "[SEP]")
_SENTINEL: Final = re.compile(r"<extra_id_\d+>")


class WordPieceTokenizer(LibraryTokenizer):
    """Tokenizer from a WordPiece vocabulary (`vocab.txt`, one piece a line), with the ids of BERT's.

    The ids are `tokenizers.BertWordPieceTokenizer`'s: text is cleaned, split at spaces, punctuation and Chinese
    characters, and cut into pieces, where `##` marks a piece inside a word. Text that reads like a special token is
    tokenised as plain text unless `special_tokens` is True.

    Args:
        path: the vocabulary, which must have `[UNK]`, `[CLS]` and `[SEP]`.
        lower_case: True for a vocabulary of lower-case text: lower-cases a text and strips its accents.
        eod_token: token that ends a document; by default `[SEP]`.
        pad_token: token that pads short samples; by default `[PAD]`.
        special_tokens: True to map special tokens written out in a text to their ids.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    Raises:
        ArgumentError: the file is not a vocabulary, or lacks a required or a named token.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        lower_case: bool = False,
        eod_token: str | None = None,
        pad_token: str | None = None,
        special_tokens: bool = False,
        megatron_identity: MegatronIdentity | None = None,
    ) -> None:
        vocab = _read(Path(path))
        made = tokenizers.BertWordPieceTokenizer(vocab, lowercase=lower_case)
        super().__init__(
            tokenizers.Tokenizer.from_str(made.to_str()),
            SpecialTokens(
                roles={role: vocab[token] for role, token in _ROLES.items() if token in vocab},
                additional=sorted(index for token, index in vocab.items() if _SENTINEL.fullmatch(token)),
            ),
            path=str(path),
            eod_token=eod_token,
            pad_token=pad_token,
            special_tokens=special_tokens,
            megatron_identity=megatron_identity,
            lower_case=lower_case,
        )
        if self._eod is None:
            self._eod = vocab["[SEP]"]
        if not lower_case and not any(_has_capital(piece) for piece in vocab):
            logger.warning("%s: no piece has a capital letter: lower_case (--lower-case) should be given", path)


def _has_capital(piece: str) -> bool:
    return not (piece.startswith("[") and piece.endswith("]")) and piece != piece.lower()


def _read(path: Path) -> dict[str, int]:
    """Returns the id of each piece of a vocabulary."""
    if not path.is_file():
        raise ArgumentError(missing_tokenizer(path))
    try:
        with panics_as_errors():
            vocab: dict[str, int] = tokenizers.models.WordPiece.read_file(str(path))
    except Exception as error:
        raise ArgumentError(f"{path}: must be a WordPiece vocabulary, one piece a line: {error}") from error
    if any(piece.startswith("\ufeff") for piece in vocab):
        raise ArgumentError(f"{path}: must begin with a piece, found a byte order mark: save it as UTF-8 without one")
    missing = [token for token in _REQUIRED if token not in vocab]
    if missing:
        other = describe_other(path)
        found = f"no {missing[0]}" if other is None else other
        raise ArgumentError(f"{path}: a WordPiece vocabulary must have {', '.join(_REQUIRED)}, found {found}")
    return vocab
