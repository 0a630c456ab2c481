"""Pictures as inline SVG: charts over steps, and rows of spans. Texts are as wide as a phone shows them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trackbed.report.columns import Floats, spread
from trackbed.report.markup import Html, element, join
from trackbed.report.numbers import exact, log_ticks, tick_text, ticks

_WIDTH: Final = 640
_HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 16, 14, 58
_ROW_HEIGHT: Final = 26
_MARKERS_A_LINE: Final = 6
_MOST_MARKS: Final = 200
_LOG_RATIO: Final = 100.0
"""Values that are all positive and differ by more than this factor can have a logarithmic axis."""
NUM_STYLES: Final = 8
"""Styles of lines, each with a color and a marker of its own."""
_MARKERS: Final = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "M0 -4.8L4.6 3.4H-4.6Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.8L4.6 -3.4H-4.6Z",
    "M-4.5 -1.5H-1.5V-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5Z",
    "M-4.6 -4.6L4.6 4.6L-4.6 4.6L4.6 -4.6Z",
    "M-2 -5H2V5H-2Z",
)


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A line, with a band from low to high if it shows bins."""

    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    style: int = 0
    is_wanted: bool = False
    """True for a dashed line that others are compared with."""


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Single values, such as those of evaluations."""

    label: str
    x: Floats
    y: Floats
    style: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """Numbers over steps."""

    name: str
    """Identifier on the page: letters, digits and hyphens."""
    title: str
    description: str
    """Text alternative."""
    lines: Sequence[Line] = ()
    points: Sequence[Points] = ()
    bars: Sequence[Points] = ()
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines: position and meaning."""
    steps: tuple[float, float] | None = None
    """First and last step of the axis; None for those of the values."""
    x_label: str = "step"
    from_zero: bool = False
    may_be_log: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a row from one position to another."""

    start: float
    stop: float
    kind: str
    """Class of the shape: "kept", "again" or "open"."""
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a picture of rows."""

    label: str
    spans: Sequence[Span]
    marks: Sequence[tuple[float, int, str]] = field(default_factory=tuple)
    """Position, style and meaning of each marker."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Scale from values to coordinates."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Returns the coordinate of a value."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        place = (math.log10(value) if self.is_log else value) - low
        return self.start + (self.stop - self.start) * (place / (high - low))

    def at_all(self, values: Floats) -> Floats:
        """Returns the coordinates of values."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        places: Floats = ((np.log10(values) if self.is_log else values) - low) / (high - low)
        return self.start + (self.stop - self.start) * places


def draw_chart(chart: Chart) -> Html:
    """Returns the picture of a chart."""
    x_axis, y_axis = _axes(chart)
    parts = [*_grid(x_axis, y_axis, chart), *_restarts(chart, x_axis)]
    for line in chart.lines:
        parts += _band(line, x_axis, y_axis)
    for line in chart.lines:
        parts += _stroke(line, x_axis, y_axis)
    for bars in chart.bars:
        parts += _bars(bars, x_axis, y_axis)
    for points in chart.points:
        parts += _points(points, x_axis, y_axis)
    return _picture(chart.name, chart.title, chart.description, _HEIGHT, parts)


def draw_rows(name: str, title: str, description: str, rows: Sequence[Row], *, x_label: str) -> Html:
    """Returns a picture of rows, one above the other, over one axis from 0 on."""
    ends = [one.stop for row in rows for one in row.spans] + [place for row in rows for place, _, _ in row.marks]
    bottom = _TOP + _ROW_HEIGHT * len(rows)
    axis = Axis(0.0, max([*ends, 1e-9]) * 1.001, _LEFT, _WIDTH - _RIGHT)
    parts = _x_grid(axis, _TOP, bottom, x_label)
    for number, row in enumerate(rows):
        middle = _TOP + _ROW_HEIGHT * (number + 0.5)
        parts.append(_text(_LEFT - 8, middle, row.label, "tick right"))
        for span in row.spans:
            x, end = axis.at(span.start), axis.at(span.stop)
            shape = {"x": x, "y": middle - 8.0, "width": max(end - x, 1.5), "height": 16.0}
            parts.append(element("rect", element("title", span.text), class_=f"span {span.kind}", **shape))
        for place, style, text in [row.marks[one] for one in spread(len(row.marks), _MOST_MARKS)]:
            parts.append(_marker(axis.at(place), middle, style, text))
    return _picture(name, title, description, bottom + _BOTTOM - 4, parts)


def swatch(label: str, style: int, kind: str = "line") -> Html:
    """Returns the sample of a style for a legend."""
    shapes = {
        "line": [element("path", d="M1 7H27", class_=f"stroke s{style}"), _marker(14, 7, style)],
        "wanted": [element("path", d="M1 7H27", class_=f"stroke wanted s{style}")],
        "point": [_marker(14, 7, style)],
        "bar": [element("rect", x=9, y=1, width=10, height=12, class_=f"bar f{style}")],
        "restart": [element("path", d="M14 0V14", class_="restart")],
    }
    spans = {"kept", "again", "open"}
    parts = [element("rect", x=2, y=2, width=24, height=10, class_=f"span {kind}")] if kind in spans else shapes[kind]
    title = element("title", f"{kind} of {label}")
    return element("svg", title, *parts, class_="swatch", viewBox="0 0 28 14", role="img")


def _picture(name: str, title: str, description: str, height: float, parts: Sequence[Html]) -> Html:
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *parts,
        class_="picture",
        viewBox=f"0 0 {_WIDTH} {height}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def _axes(chart: Chart) -> tuple[Axis, Axis]:
    shapes: list[Line | Points] = [*chart.lines, *chart.points, *chart.bars]
    x = np.concatenate([one.x[~np.isnan(one.y)] for one in shapes] or [np.zeros(1, dtype=np.float64)])
    ys = [one.y for one in shapes]
    ys += [band for line in chart.lines for band in (line.low, line.high) if band is not None]
    y = np.concatenate(ys or [np.zeros(1, dtype=np.float64)])
    y = y[~np.isnan(y)] if not np.isnan(y).all() else np.zeros(1, dtype=np.float64)
    low, high = float(y.min()), float(y.max())
    known = np.concatenate([one.y[~np.isnan(one.y)] for one in shapes] or [y])
    is_log = chart.may_be_log and low > 0 and float(known.max()) > _LOG_RATIO * float(known.min())
    if is_log:
        low, high = low / 1.2, high * 1.2
    else:
        low = min(low, 0.0) if chart.from_zero else low
        is_flat = high - low <= 1e-9 * max(abs(low), abs(high))
        pad = (0.5 * abs(high) if is_flat else 0.05 * (high - low)) or 0.5
        low, high = (0.0 if 0 <= low < pad else low - pad), high + pad
    first, last = chart.steps or ((float(x.min()), float(x.max())) if len(x) else (0.0, 1.0))
    pad = 0.01 * (last - first) or 0.5
    x_axis = Axis(first - pad, last + pad, _LEFT, _WIDTH - _RIGHT)
    return x_axis, Axis(low, high, _HEIGHT - _BOTTOM, _TOP, is_log)


def _grid(x_axis: Axis, y_axis: Axis, chart: Chart) -> list[Html]:
    parts = _x_grid(x_axis, _TOP, _HEIGHT - _BOTTOM, chart.x_label, are_whole=True)
    values = (log_ticks if y_axis.is_log else ticks)(y_axis.low, y_axis.high)
    for value in values:
        y = y_axis.at(value)
        parts.append(element("path", d=f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}", class_="rule"))
        parts.append(_text(_LEFT - 8, y, _tick(value, values, y_axis), "tick right"))
    return parts


def _tick(value: float, values: list[float], axis: Axis) -> str:
    return tick_text(value, [value]) if axis.is_log else tick_text(value, values)


def _x_grid(axis: Axis, top: float, bottom: float, label: str, *, are_whole: bool = False) -> list[Html]:
    values = [value for value in ticks(axis.low, axis.high, 8) if not are_whole or value == round(value)]
    parts = [element("path", d=f"M{axis.start} {bottom}H{axis.stop}", class_="axis")]
    for number, value in enumerate(values):
        x = axis.at(value)
        sparse = " sparse" if number % 2 else ""  # left out on a narrow screen
        parts.append(element("path", d=f"M{x:.1f} {top}V{bottom}", class_=f"rule{sparse}"))
        parts.append(_text(x, bottom + 18, tick_text(value, values), f"tick middle{sparse}"))
    parts.append(_text((axis.start + axis.stop) / 2, bottom + 42, label, "label middle"))
    return parts


def _restarts(chart: Chart, axis: Axis) -> list[Html]:
    inside = [(place, text) for place, text in chart.marks if axis.low <= place <= axis.high]
    shown = [inside[number] for number in spread(len(inside), _MOST_MARKS)]
    return [
        element("path", element("title", text), d=f"M{axis.at(place):.1f} {_TOP}V{_HEIGHT - _BOTTOM}", class_="restart")
        for place, text in shown
    ]


def _band(line: Line, x_axis: Axis, y_axis: Axis) -> list[Html]:
    if line.low is None or line.high is None:
        return []
    x, low, high = x_axis.at_all(line.x), y_axis.at_all(line.low), y_axis.at_all(line.high)
    outlines = []
    for part in _unbroken(line.y):
        there = _path(x[part], high[part])
        back = _path(x[part][::-1], low[part][::-1])
        outlines.append(f"{there}L{back[1:]}Z")
    return [element("path", d=Html("".join(outlines)), class_=f"band f{line.style}")]


def _stroke(line: Line, x_axis: Axis, y_axis: Axis) -> list[Html]:
    x, y = x_axis.at_all(line.x), y_axis.at_all(line.y)
    # A stretch of one point has no length; its round ends make it a dot.
    strokes = "".join(
        _path(x[part], y[part]) + ("h0" if part.stop - part.start == 1 else "") for part in _unbroken(line.y)
    )
    wanted = " wanted" if line.is_wanted else ""
    parts = [element("path", element("title", line.label), d=Html(strokes), class_=f"stroke{wanted} s{line.style}")]
    if line.is_wanted:
        return parts
    known = np.flatnonzero(~np.isnan(line.y))
    for number in spread(len(known), _MARKERS_A_LINE + 2)[1:-1] if len(known) > _MARKERS_A_LINE + 2 else []:
        # Styles begin at different points, so that markers of lines close to each other do not cover each other.
        place = known[(number + line.style * len(known) // (NUM_STYLES * _MARKERS_A_LINE)) % len(known)]
        parts.append(_marker(float(x[place]), float(y[place]), line.style, line.label))
    return parts


def _bars(bars: Points, x_axis: Axis, y_axis: Axis) -> list[Html]:
    width = max(1.5, min(10.0, 0.6 * (_WIDTH - _LEFT - _RIGHT) / max(1, len(bars.x))))
    zero = y_axis.at(max(y_axis.low, 0.0))
    parts = []
    for x, y in zip(bars.x.tolist(), bars.y.tolist(), strict=True):
        if math.isnan(y):
            continue
        top = y_axis.at(y)
        shape = {"x": x_axis.at(x) - width / 2, "y": min(top, zero), "width": width, "height": abs(zero - top)}
        title = element("title", f"step {x:,.0f}: {exact(y)} {bars.label}")
        parts.append(element("rect", title, class_=f"bar f{bars.style}", **shape))
    return parts


def _points(points: Points, x_axis: Axis, y_axis: Axis) -> list[Html]:
    return [
        _marker(
            x_axis.at(float(points.x[number])),
            y_axis.at(float(points.y[number])),
            points.style,
            f"step {points.x[number]:,.0f}: {exact(float(points.y[number]))} ({points.label})",
        )
        for number in spread(len(points.x), _MOST_MARKS)
        if not math.isnan(points.y[number])
    ]


def _marker(x: float, y: float, style: int, text: str | None = None) -> Html:
    title = [] if text is None else [element("title", text)]
    place = f"translate({x:.1f} {y:.1f})"
    return element(
        "path", *title, d=_MARKERS[style % NUM_STYLES], transform=place, class_=f"marker f{style % NUM_STYLES}"
    )


def _text(x: float, y: float, text: str, class_: str) -> Html:
    # A vertical shift in units of the font, which depends on the width of the picture.
    return element("text", text, x=x, y=y, dy="0.35em", class_=class_)


def _unbroken(values: Floats) -> Iterator[slice]:
    """Yields the stretches without NaN."""
    known = np.flatnonzero(~np.isnan(values))
    for part in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1) if len(known) else []:
        yield slice(int(part[0]), int(part[-1]) + 1)


def _path(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{one:.1f} {other:.1f}" for one, other in zip(x.tolist(), y.tolist(), strict=True))


def legend(items: Sequence[tuple[str, Html]]) -> Html:
    """Returns a list of names, each with its swatch."""
    return element("ul", *(element("li", picture, " ", name) for name, picture in items), class_="legend")


def figure(caption: str, picture: Html, *below: Html) -> Html:
    """Returns a picture with its caption, and what belongs to it."""
    return element("figure", element("figcaption", caption), picture, join(*below))
