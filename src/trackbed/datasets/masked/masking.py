"""Choice of the tokens of a sample that are masked, draw by draw as in megatron-core 0.16.1, by their word pieces.

Shapes: T tokens of a sample, V one more than the highest token id.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.datasets.start import shared
from trackbed.errors import ArgumentError

_GEOMETRIC_P: Final = 0.2
"""Parameter of SpanBERT's geometric distribution."""

DrawMask = Callable[[], int | None]
"""Draws what replaces a masked token; None to leave it as it is."""


class Masked(NamedTuple):
    """A sample whose tokens are masked."""

    tokens: list[int]
    """`[T]` ids."""
    positions: list[int]
    """Positions of the masked and permuted tokens, in increasing order."""
    labels: list[int]
    """Ids that were at these positions."""
    spans: list[tuple[list[int], list[int]]]
    """Positions and former ids of each n-gram that was masked, in the order of their first positions."""


@dataclass(frozen=True)
class MaskingRules:
    """Fields of the configuration that decide which tokens are masked."""

    probability: float
    max_ngram: int
    uses_longer_ngrams: bool
    uses_geometric_distribution: bool
    permutes: bool

    def most_masked(self, num_tokens: int, target_length: int) -> float:
        """Returns how many tokens of a sample are masked at most: it need not be a whole number."""
        return min(self.probability * target_length, max(1, round(num_tokens * self.probability)))

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """`[max_ngram]` probability of each number of words."""
        return ngram_weights(self.max_ngram, favours_longer=self.uses_longer_ngrams)

    @cached_property
    def cumulative(self) -> npt.NDArray[np.float64]:
        """`[max_ngram]` probability of each number of words or fewer, as NumPy's `choice` computes it."""
        sums = self.weights.cumsum()
        shares: npt.NDArray[np.float64] = sums / sums[-1]
        return shares

    def draw_words(self, random: np.random.RandomState) -> int:
        """Draws the number of words to mask together."""
        if self.uses_geometric_distribution:
            return min(int(random.geometric(_GEOMETRIC_P)), self.max_ngram)
        return 1 + int(random.choice(self.max_ngram, p=self.weights))


@lru_cache(maxsize=8)
def ngram_weights(max_ngram: int, *, favours_longer: bool) -> npt.NDArray[np.float64]:
    """Returns `[max_ngram]` probability of each number of words, in inverse proportion to it, or to its reverse.

    >>> ngram_weights(3, favours_longer=False).round(3)
    array([0.545, 0.273, 0.182])
    """
    inverse = 1.0 / np.arange(1, max_ngram + 1)
    weights = inverse / inverse.sum(keepdims=True)
    weights = weights[::-1] if favours_longer else weights
    found: npt.NDArray[np.float64] = weights / weights.sum(keepdims=True)  # twice, for the same last bits
    return found


def mask_words(
    tokens: Sequence[int],
    words: Sequence[list[int]],
    target_length: int,
    rules: MaskingRules,
    draw_mask: DrawMask,
    random: np.random.RandomState,
) -> Masked:
    """Masks n-grams of words, in random order, until there are enough masked tokens.

    Args:
        tokens: `[T]` ids.
        words: positions of the tokens of each word.
        target_length: tokens that the sample is meant to have.
        rules: the configuration.
        draw_mask: called for each masked token.
        random: the sample's stream.
    """
    most = rules.most_masked(len(tokens), target_length)
    order = list(range(len(words)))
    random.shuffle(order)
    masked = list(tokens)
    labels: dict[int, int] = {}
    spans = []
    for chosen in _ngrams(words, order, most, rules, random, taken=labels):
        for position in chosen:
            labels[position] = tokens[position]
            drawn = draw_mask()
            masked[position] = tokens[position] if drawn is None else drawn
        spans.append((chosen, [tokens[position] for position in chosen]))
    random.shuffle(order)
    if rules.permutes:
        permuted: dict[int, int] = {}
        for chosen in _ngrams(words, order, most, rules, random, taken=permuted, others=labels):
            permuted.update((position, masked[position]) for position in chosen)
        sources = sorted(permuted)
        random.shuffle(sources)
        for position, source in zip(sorted(permuted), sources, strict=True):
            masked[position] = permuted[source]
        labels.update(permuted)
    positions = sorted(labels)
    spans.sort(key=lambda span: span[0][0])
    return Masked(masked, positions, [labels[position] for position in positions], spans)


def _ngrams(
    words: Sequence[list[int]],
    order: Sequence[int],
    most: float,
    rules: MaskingRules,
    random: np.random.RandomState,
    *,
    taken: dict[int, int],
    others: dict[int, int] | None = None,
) -> Iterator[list[int]]:
    """Yields the positions of n-grams that overlap with none of `taken`, which the caller adds them to, or `others`.

    An n-gram that would exceed `most` positions is shortened word by word, and left out if one word is too long.
    """
    for first in order:
        if len(taken) >= most:
            return
        count = rules.draw_words(random)
        chosen = [position for word in words[first : first + count] for position in word]
        while count > 1 and len(taken) + len(chosen) > most:
            count -= 1
            chosen = [position for word in words[first : first + count] for position in word]
        fits = len(taken) + len(chosen) <= most
        if fits and not any(position in taken or position in (others or ()) for position in chosen):
            yield chosen


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
    ids = [_id_of(tokenizer, name) for name in names]
    missing = [name for name, token in zip(names, ids, strict=True) if token is None]
    if missing:
        wanted, kind = " and ".join(missing), type(tokenizer).__name__
        tokens = " and ".join(f"[{name.upper()}]" for name in missing)
        raise ArgumentError(
            f"the tokenizer must have {wanted} for masked samples, found a {kind} without: add {tokens} to its "
            "vocabulary, or tokens with these roles"
        )
    return [token for token in ids if token is not None]


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
