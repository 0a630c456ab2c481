"""Splitting of very long texts for tokenisation.

Hugging Face `tokenizers` uses more than a hundred bytes of memory per byte of text, so one text of hundreds of
megabytes exhausts a machine. A long text is therefore cut between two words, where the concatenated tokens of the
parts equal the tokens of the whole. Each cut is verified by tokenising the text around it; if no cut passes, as with
tokenizers that put a mark in front of every text, the text stays whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

PART_CHARS: Final = 4 << 20
"""Maximum length of a text that is never cut."""

_WINDOW_CHARS: Final = 4 << 10
_TRIES: Final = 64
_STRIDE_CHARS: Final = 64
# Before a space or a line end between words, and, for scripts without spaces, after a punctuation mark.
_BETWEEN_WORDS: Final = re.compile(r"(?<=\S)(?=[ \n]\S)|(?<=\w)(?=\n)|(?<=[^\w\s])(?=\w)")

Tokenize = Callable[[str], Iterable[Any]]


def split_text(text: str, tokenize: Tokenize, *, part_chars: int = PART_CHARS) -> Iterator[str]:
    """Splits a text into parts whose concatenated tokens are the tokens of the text.

    Args:
        text: a text of any length.
        tokenize: function from a text to its token ids.
        part_chars: number of characters after which the search for a cut starts, at least 1.

    >>> list(split_text("one two three", list, part_chars=5))
    ['one two', ' three']
    """
    start, earliest = 0, part_chars
    while earliest < len(text):
        cut = _find_cut(text, earliest, tokenize)
        if cut is not None:
            yield text[start:cut]
            start = cut
        earliest = (earliest if cut is None else cut) + part_chars
    yield text[start:]


def _find_cut(text: str, earliest: int, tokenize: Tokenize) -> int | None:
    """Returns the first position between words, from `earliest` on, where a cut changes no token; None if not found."""
    position = earliest
    for attempt in range(_TRIES):
        candidate = _BETWEEN_WORDS.search(text, position, position + _WINDOW_CHARS)
        if candidate is None:
            position += _WINDOW_CHARS
            continue
        cut = candidate.start()
        left, right = text[max(0, cut - _WINDOW_CHARS) : cut], text[cut : cut + _WINDOW_CHARS]
        if [*tokenize(left), *tokenize(right)] == [*tokenize(left + right)]:
            return cut
        # The cause of this failure is likely to affect nearby cuts too, so the stride grows.
        position = cut + 1 + attempt * _STRIDE_CHARS
    return None
