"""Kinds of data by their first bytes, for messages about files whose names promise something else.

One kind are pointers, which version control leaves in the place of a file whose content was not fetched.
"""

import re
from typing import Final, NamedTuple

from trackbed.errors import ArgumentError

HEAD_BYTES: Final = 512
"""Bytes at the beginning of a file that are enough to name its kind."""

GZIP: Final = "gzip data"
ZSTANDARD: Final = "Zstandard data"

_TAR_MAGIC_AT: Final = 257
_MAGICS: Final = (
    (b"\x1f\x8b", GZIP),
    (b"\x28\xb5\x2f\xfd", ZSTANDARD),
    *((bytes([first]) + b"\x2a\x4d\x18", ZSTANDARD) for first in range(0x50, 0x60)),  # a frame to be skipped
    *((bytes([first]) + b"\xb5\x2f\xfd", "data of Zstandard before version 0.8") for first in range(0x22, 0x28)),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"BZh", "bzip2 data"),
    (b"\x04\x22\x4d\x18", "LZ4 data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\xff\xff\xff\xff", "an Arrow stream"),
)

_UNREAD: Final = {
    ".tar": ("a tar archive", "unpack it (tar -xf), and give the folder of its files"),
    ".tgz": ("a tar archive", "unpack it (tar -xf), and give the folder of its files"),
    ".zip": ("a zip archive", "unpack it, and give the folder of its files"),
    ".7z": ("a 7z archive", "unpack it, and give the folder of its files"),
    ".xz": ("xz data", "decompress it (xz -d), or compress it with gzip or zstd"),
    ".bz2": ("bzip2 data", "decompress it (bzip2 -d), or compress it with gzip or zstd"),
    ".lz4": ("LZ4 data", "decompress it (lz4 -d), or compress it with gzip or zstd"),
    ".arrow": ("an Arrow file", "write it as Parquet, or save the dataset as JSON lines"),
    ".feather": ("an Arrow file", "write it as Parquet, or save the dataset as JSON lines"),
}


def begins_as(head: bytes, kind: str) -> bool:
    r"""True if a file with these first bytes may be data of a kind, of which a cut file may have only a part.

    >>> begins_as(b"\x28\xb5", ZSTANDARD), begins_as(b"\x28\xb6", ZSTANDARD)
    (True, False)
    """
    return any(head.startswith(magic) or magic.startswith(head) for magic, name in _MAGICS if name == kind)


def kind_of(head: bytes) -> str | None:
    r"""Returns the kind of a file by its first bytes, such as `gzip data` or `plain text`; None if it is not known.

    >>> kind_of(b"\x1f\x8b\x08"), kind_of(b'{"text": "a"}\n'), kind_of(b"\x00\x01")
    ('gzip data', 'plain text', None)
    """
    found = next((name for magic, name in _MAGICS if head.startswith(magic)), None)
    if head.startswith(b"ustar", _TAR_MAGIC_AT):
        return "a tar archive"
    if found is not None or not head:
        return found
    text = head.decode(errors="ignore")  # the last character may be cut
    is_text = len(text.encode()) > len(head) - 4 and all(char.isprintable() or char in "\t\n\r\f" for char in text)
    return "plain text" if is_text else None


def unread_name(name: str) -> tuple[str, str] | None:
    """Returns the kind of data that a file name states, if it is one that is not read, and what to do; else None.

    >>> unread_name("corpus.tar.gz")
    ('a tar archive', 'unpack it (tar -xf), and give the folder of its files')
    """
    words = name.lower().split(".")
    suffixes = [f".{word}" for word in words[:0:-1]]
    if suffixes[:1] in ([".gz"], [".zst"]) or suffixes[1:2] == [".tar"]:
        suffixes = suffixes[1:]
    return _UNREAD.get(suffixes[0]) if suffixes else None


class _PointerKind(NamedTuple):
    content: re.Pattern[bytes]
    program: str
    command: str


_KINDS: Final = (
    _PointerKind(
        re.compile(
            rb"version https?://(git-lfs|hawser)\.github\.com/spec/v\d+\s.*\boid sha256:[0-9a-f]{64}\b", re.DOTALL
        ),
        "Git LFS",
        "git lfs pull",
    ),
    _PointerKind(re.compile(rb"/annex/objects/\S+-s\d+\S*--\S+\s*"), "git-annex", "git annex get"),
)
MIN_POINTER_BYTES: Final = 48
MAX_POINTER_BYTES: Final = 1023
"""Git LFS takes no larger file for a pointer."""


def refuse_pointer(name: str, content: bytes) -> None:
    """Refuses the content of a file that only says where the file is.

    Args:
        name: path or address of the file.
        content: all its bytes, `MIN_POINTER_BYTES` to `MAX_POINTER_BYTES` of them.
    """
    for kind in _KINDS:
        if kind.content.match(content):
            raise ArgumentError(
                f"{name}: an input must hold its content, found the pointer of {kind.program} to it; "
                f"run `{kind.command}` in its folder"
            )
