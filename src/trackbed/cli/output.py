"""Output of commands: error messages of one line, tables, and text in any encoding.

Characters that an encoding lacks are escaped, as batch systems and old containers have no UTF-8.
"""

import codecs
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from trackbed.errors import BlendFileError, TrackbedError

if TYPE_CHECKING:
    from rich.console import Console


_HANDLER: Final = "trackbed.escape"


def accept_any_text() -> None:
    """Makes the standard output of this process take any text: it escapes characters that its encoding lacks.

    Where the standard output or error is closed (`>&-`), text is dropped, and no file is opened in its place.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    codecs.register_error(_HANDLER, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper) and not is_utf8():
        sys.stdout.reconfigure(errors=_HANDLER)


def is_utf8() -> bool:
    """True if the standard output holds every character."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return codecs.lookup(encoding).name.startswith("utf-")


def json_text(fields: dict[str, Any]) -> str:
    """Returns JSON of several lines, in ASCII if the output is not UTF-8, as other escapes are no JSON."""
    return json.dumps(fields, ensure_ascii=not is_utf8(), indent=1)


def printable(text: str, *, keep: str = "") -> str:
    """Escapes control characters, so that none of them reaches the terminal, and characters that the output lacks.

    Args:
        text: the text.
        keep: control characters that stay.
    """
    shown = "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)
    if is_utf8():
        return shown
    return shown.encode(sys.stdout.encoding, errors="backslashreplace").decode(sys.stdout.encoding)


def mark_run(shown: str, *, counts: bool) -> str:
    """Puts text that does not count in the loss between `{-` and `-}`."""
    return shown if counts else f"{{-{shown}-}}"


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler of a codec: the bytes of a name that is no UTF-8 stay, and characters become escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    chars = error.object[error.start : error.end]
    return b"".join(
        char.encode("ascii", errors="surrogateescape" if "\udc80" <= char <= "\udcff" else "backslashreplace")
        for char in chars
    ), error.end


_UNLIMITED: Final = 10_000


def table_console() -> "Console":
    """Returns a console as wide as the terminal; to a file or pipe, so wide that nothing is wrapped or cut."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED)


EXPECTED = (TrackbedError, OSError, MemoryError)
"""Errors caused by the user's files, options or machine; any other error is a bug."""


def describe(error: BaseException) -> str:
    """Returns one line: the location, what must hold, and what was found.

    >>> describe(FileNotFoundError(2, "No such file or directory", "corpus.idx"))
    'corpus.idx: No such file or directory'
    """
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        message = f"this must fit into memory, found too little free{f': {message}' if message else ''}"
    return " ".join(message.splitlines())


def describe_all(error: BaseException) -> list[str]:
    """Returns one line, or one for each of the first problems of a blend file."""
    return list(error.shown) if isinstance(error, BlendFileError) else [describe(error)]
