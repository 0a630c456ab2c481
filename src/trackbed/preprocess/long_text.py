"""Tokenising very long texts part by part.

Hugging Face `tokenizers` takes more than a hundred bytes of memory for each byte of a text, so that one text
of hundreds of megabytes fills a machine. Such a text is cut between two words, where the tokens of the parts
are, one after the other, the tokens of the whole. Whether they are is asked of the tokenizer itself at every
cut, with the text around it; where no cut passes, as with tokenizers that begin every text with a mark of
their own, the text stays whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

__all__ = ["PART_CHARS", "split_text"]

PART_CHARS: Final = 4 << 20
"""Texts up to this length are never cut."""

_SEARCH_CHARS: Final = 64 << 10
_WINDOW_CHARS: Final = 4 << 10
_TRIES: Final = 16
_BETWEEN_WORDS: Final = re.compile(r"(?<=\w)(?=[ \n]\w)|(?<=\w\n)(?=\w)|(?<=\W)(?=\w)")

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
    start = 0
    while len(text) - start > part_chars:
        cut = _find_cut(text, start + part_chars, tokenize)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _find_cut(text: str, earliest: int, tokenize: Tokenize) -> int | None:
    """The first place between words, from `earliest` on, where cutting changes no token; None if none is found."""
    candidates = _BETWEEN_WORDS.finditer(text, earliest, earliest + _SEARCH_CHARS)
    for candidate in islice(candidates, _TRIES):
        cut = candidate.start()
        left, right = text[max(0, cut - _WINDOW_CHARS) : cut], text[cut : cut + _WINDOW_CHARS]
        if [*tokenize(left), *tokenize(right)] == [*tokenize(left + right)]:
            return cut
    return None
