"""Types of the pieces of a SentencePiece model, which the library does not tell.

A model is a protocol buffer. Its first field repeats: one message per piece, whose third field is the type. Numbers are
varints of 7 bits a byte, the lowest first.
"""

from collections.abc import Iterator
from typing import Final

__all__ = ["user_defined_ids"]

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
