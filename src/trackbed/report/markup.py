"""Elements of HTML and SVG as text. Every text from outside is escaped on its way into an element."""

from html import escape
from typing import Final

_VOID: Final = ("br", "link", "meta")
"""Elements without an end tag."""
_MOST_CHARS: Final = 1000


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """Returns an element of HTML or SVG.

    Args:
        name: name of the element.
        children: markup, and texts, which are escaped.
        attributes: values by name; `_` stands for `-`, one at the end is dropped, and None leaves an attribute out.

    >>> element("p", "a < b", element("br"), class_="note", data_x=1.50)
    '<p class="note" data-x="1.5">a &lt; b<br></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    start = "".join([f"<{name}", *(f' {key}="{_value_text(value)}"' for key, value in given.items()), ">"])
    return Html(start if name in _VOID else f"{start}{join(*children)}</{name}>")


def join(*parts: str) -> Html:
    """Returns markup and texts one after the other, with the texts escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(visible(part)) for part in parts))


def visible(text: str) -> str:
    r"""Returns a text with control characters written as escapes, and a very long one without its middle.

    >>> visible("a\x1b[0m\n"), len(visible("x" * 10_000))
    ('a\\x1b[0m\\n', 1000)
    """
    text = short(text, _MOST_CHARS)
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def short(text: str, most: int = 40) -> str:
    """Returns a text of at most `most` characters, without its middle if it is longer.

    >>> short("data/web-2024", 9)
    'dat...024'
    """
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[: most - 3 - half]}...{text[-half:]}"


def _value_text(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value if isinstance(value, Html) else visible(value))
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
