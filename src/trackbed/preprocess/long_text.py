"""Tokenising very long texts part by part.

Hugging Face `tokenizers` takes more than a hundred bytes of memory for each byte of a text, so that one text
of hundreds of megabytes fills a machine. Such a text is cut between two words, where the tokens of the parts
are, one after the other, the tokens of the whole. Whether they are is asked of the tokenizer itself at every
cut, with the text around it; where no cut passes, as with tokenizers that begin every text with a mark of
their own, the text stays whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

__all__ = ["PART_CHARS", "split_text"]

PART_CHARS: Final = 4 << 20
"""Texts up to this length are never cut."""

_WINDOW_CHARS: Final = 4 << 10
_TRIES: Final = 64
_STRIDE_CHARS: Final = 64
# Before a space or a line end between words, and, for scripts without spaces, behind a mark.
_BETWEEN_WORDS: Final = re.compile(r"(?<=\S)(?=[ \n]\S)|(?<=\w)(?=\n)|(?<=[^\w\s])(?=\w)")

Tokenize = Callable[[str], Iterable[Any]]


def split_text(text: str, tokenize: Tokenize, *, part_chars: int = PART_CHARS) -> Iterator[str]:
    """Parts of a text whose tokens, one after the other, are the tokens of the text.

    Args:
        text: a text of any length.
        tokenize: token ids of a text.
        part_chars: characters after which a place for a cut is looked for, at least 1.

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
    """The first place between words, from `earliest` on, where cutting changes no token; None if none is found."""
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
        # What spoilt this cut is likely to spoil the next ones, too: look ever farther away.
        position = cut + 1 + attempt * _STRIDE_CHARS
    return None
