"""Output in any encoding: what it cannot hold is escaped, as batch systems and old containers have no UTF-8."""

import codecs
import io
import json
import sys
from typing import Any, Final

_HANDLER: Final = "trackbed.escape"


def accept_any_text() -> None:
    """Makes the standard output of this process escape characters that its encoding lacks, instead of failing."""
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


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler of a codec: the bytes of a name that is no UTF-8 stay, and characters become escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    chars = error.object[error.start : error.end]
    return b"".join(
        char.encode("ascii", errors="surrogateescape" if "\udc80" <= char <= "\udcff" else "backslashreplace")
        for char in chars
    ), error.end
