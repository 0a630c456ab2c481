"""Pointers that version control leaves in the place of a file whose content was not fetched."""

import re
from typing import Final, NamedTuple

from trackbed.errors import ArgumentError

__all__ = ["MAX_POINTER_BYTES", "MIN_POINTER_BYTES", "refuse_pointer"]


class _Kind(NamedTuple):
    content: re.Pattern[bytes]
    program: str
    command: str


_KINDS: Final = (
    _Kind(
        re.compile(
            rb"version https?://(git-lfs|hawser)\.github\.com/spec/v\d+\s.*\boid sha256:[0-9a-f]{64}\b", re.DOTALL
        ),
        "Git LFS",
        "git lfs pull",
    ),
    _Kind(re.compile(rb"/annex/objects/\S+-s\d+\S*--\S+\s*"), "git-annex", "git annex get"),
)
MIN_POINTER_BYTES: Final = 48
MAX_POINTER_BYTES: Final = 1023
"""Git LFS takes no larger file for a pointer."""


def refuse_pointer(name: str, content: bytes) -> None:
    """Refuses the content of a file that only says where the file is.

    Args:
        name: path or address of the file.
        content: all its bytes, `MIN_POINTER_BYTES` to `MAX_POINTER_BYTES` of them.

    Raises:
        ArgumentError: it is a pointer.
    """
    for kind in _KINDS:
        if kind.content.match(content):
            msg = (
                f"{name}: an input must hold its content, found the pointer of {kind.program} to it; "
                f"run `{kind.command}` in its folder"
            )
            raise ArgumentError(msg)
