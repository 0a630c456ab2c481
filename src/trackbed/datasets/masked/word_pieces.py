"""Properties of a WordPiece tokenizer that masking needs.

Shapes: V one more than the highest token id.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.datasets.start import shared
from trackbed.errors import ArgumentError

STARTS: Final = 0
CONTINUES: Final = 1
UNKNOWN: Final = 2
"""Kinds of tokens: the first of a word, a later one of a word, and ids that no token has."""
_PREFIX: Final = "##"
_MOST_IDS: Final = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class WordPieces:
    """Tokens of a tokenizer, as masking sees them."""

    cls: int
    """Id of the token that begins a sample; never masked."""
    sep: int
    """Id of the token that ends a segment; never masked."""
    mask: int
    """Id that stands for a masked token."""
    listed: Sequence[int]
    """All ids, in the order of `inv_vocab`."""
    kinds: npt.NDArray[np.uint8]
    """`[V]` STARTS, CONTINUES or UNKNOWN, by id."""

    def kind_of(self, token: int) -> int:
        """Returns the kind of a token id, which may be any integer."""
        return int(self.kinds[token]) if 0 <= token < len(self.kinds) else UNKNOWN


@lru_cache(maxsize=16)
def digest_of(pieces: WordPieces) -> str:
    """Returns a digest of all properties, computed once for an object."""
    found = hashlib.sha256(np.array([pieces.cls, pieces.sep, pieces.mask, *pieces.listed]).tobytes())
    found.update(pieces.kinds.tobytes())
    return found.hexdigest()[:32]


def word_pieces_of(tokenizer: Any) -> WordPieces:
    """Returns the properties of a tokenizer, computed once in a start."""
    return shared("word pieces", lambda: _read(tokenizer), tokenizer)


def special_ids(tokenizer: Any, *names: str) -> list[int]:
    """Returns the ids of special tokens."""
    found = [_id_of(tokenizer, name) for name in names]
    missing = [name for name, token in zip(names, found, strict=True) if token is None]
    if missing:
        wanted, kind = " and ".join(missing), type(tokenizer).__name__
        tokens = " and ".join(f"[{name.upper()}]" for name in missing)
        raise ArgumentError(
            f"the tokenizer must have {wanted} for masked samples, found a {kind} without: add {tokens} to its "
            "vocabulary, or tokens with these roles"
        )
    return [token for token in found if token is not None]


def _id_of(tokenizer: Any, name: str) -> int | None:
    try:
        found = getattr(tokenizer, name)
    except (AttributeError, NotImplementedError):
        return None
    return int(found) if isinstance(found, (int, np.integer)) else None


def _read(tokenizer: Any) -> WordPieces:
    cls, sep, mask = special_ids(tokenizer, "cls", "sep", "mask")
    try:
        vocabulary: Mapping[int, str] = tokenizer.inv_vocab
    except (AttributeError, NotImplementedError):
        name = type(tokenizer).__name__
        raise ArgumentError(
            f"the tokenizer must have inv_vocab, its texts by id, for masked samples, found a {name} without"
        ) from None
    listed = [int(token) for token in vocabulary]
    lowest, highest = min(listed, default=0), max(listed, default=0)
    if not listed or lowest < 0 or highest >= _MOST_IDS:
        found = f"{lowest} to {highest}" if listed else "none"
        raise ArgumentError(f"inv_vocab of the tokenizer must have ids in [0, 2**28), found {found}")
    kinds = np.full(highest + 1, UNKNOWN, dtype=np.uint8)
    kinds[listed] = [CONTINUES if text.startswith(_PREFIX) else STARTS for text in vocabulary.values()]
    return WordPieces(cls, sep, mask, listed, kinds)
