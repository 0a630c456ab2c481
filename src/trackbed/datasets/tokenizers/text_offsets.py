"""Characters at which the tokens of a text begin, for tokens that are bytes."""

from collections.abc import Iterable

__all__ = ["char_offsets"]


def char_offsets(tokens: Iterable[bytes]) -> list[int]:
    r"""Returns the character at which each token begins, in the text of their concatenated UTF-8.

    A token that begins inside a character is said to begin with it.

    >>> char_offsets([b"na", b"\xc3", b"\xafve"])
    [0, 2, 2]
    """
    offsets = []
    num_chars = 0
    for token in tokens:
        offsets.append(max(num_chars - _is_inside(token[0]), 0) if token else num_chars)
        num_chars += sum(not _is_inside(byte) for byte in token)
    return offsets


def _is_inside(byte: int) -> bool:
    """True if the byte continues a character."""
    return 0x80 <= byte < 0xC0
