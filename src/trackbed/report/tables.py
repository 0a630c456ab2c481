"""Tables of exact numbers, and notes."""

from collections.abc import Iterable, Mapping, Sequence

from trackbed.plural import number_of
from trackbed.report.columns import Curve
from trackbed.report.markup import Html, element, join
from trackbed.report.numbers import exact


def note(text: str) -> Html:
    """Returns a paragraph that says what is missing, or how to read something."""
    return element("p", text, class_="note")


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[int] = ()) -> Html:
    """Returns a table, in a box that scrolls.

    Args:
        caption: name of the table.
        head: names of the columns. The first column names the rows.
        rows: cells.
        texts: further columns of text; the others have numbers, and are aligned to the right.
    """
    kinds = ["text" if number in texts or not number else "number" for number in range(len(head))]
    top = element("tr", *(element("th", one, scope="col", class_=kind) for one, kind in zip(head, kinds, strict=True)))
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)),
        )
        for row in rows
    ]
    content = element("table", element("thead", top), element("tbody", *body), aria_label=caption)
    # The caption stands outside the box, where it is not as wide as the table.
    box = element("div", content, class_="scroll", tabindex=0, role="region", aria_label=caption)
    return element("div", element("p", caption, class_="caption"), box, class_="table")


def beside(figure: Html, *content: Html) -> Html:
    """Returns a figure with content at its side, or below it on a narrow screen."""
    return element("div", figure, element("div", *content), class_="grid beside")


def folded(summary: str, *content: Html) -> Html:
    """Returns content that is shown on a click."""
    return element("details", element("summary", summary), *content)


def most_rows(rows: Sequence[Sequence[str]], most: int, noun: str) -> tuple[list[Sequence[str]], list[Html]]:
    """Returns the first and the last rows of a long table, and a note on those left out."""
    if len(rows) <= most:
        return list(rows), []
    kept = [*rows[: most // 2], *rows[-(most // 2) :]]
    return kept, [note(f"{number_of(len(rows) - len(kept), noun)} in between left out.")]


def curve_table(caption: str, curves: Mapping[str, Curve], scale: float = 1.0) -> Html:
    """Returns a table of the exact numbers of curves, divided by `scale`."""
    head = ("value of", "first", "last", "lowest", "at step", "highest", "at step", "mean", "values")
    rows = [
        (
            name,
            exact(one.first.value / scale),
            exact(one.last.value / scale),
            exact(one.lowest.value / scale),
            f"{one.lowest.step:,}",
            exact(one.highest.value / scale),
            f"{one.highest.step:,}",
            exact(one.average / scale),
            f"{one.num_values:,}",
        )
        for name, one in curves.items()
    ]
    unknown = sum(one.num_unknown for one in curves.values())
    remarks = [note(f"{number_of(unknown, 'value')} not known or not finite.")] if unknown else []
    return join(table(caption, head, rows), *remarks)
