"""Numbers as text, and the ticks of an axis."""

import math
from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES: Final = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIMES: Final = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"))


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns round values in `[low, high]`, with equal distances.

    >>> ticks(0, 10), ticks(0.0021, 0.0039, 4)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.0025, 0.003, 0.0035])
    """
    if not low < high:
        return [low]
    step = _step(low, high, most)
    start, stop = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(start, stop + 1)]


def _step(low: float, high: float, most: int) -> float:
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= least * 0.999)


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns powers of ten in `[low, high]`.

    >>> log_ticks(0.05, 2000)
    [0.1, 1.0, 10.0, 100.0, 1000.0]
    """
    start, stop = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, -(-(stop - start + 1) // most))
    return [10.0**power for power in range(start, stop + 1, every)]


def tick_text(value: float, among: list[float]) -> str:
    """Returns the label of a tick, with as many digits as its neighbours need.

    >>> [tick_text(one, [0.0, 2500.0, 5000.0]) for one in (0.0, 2500.0)], tick_text(0.5, [0.0, 0.5, 1.0])
    (['0', '2.5k'], '0.5')
    """
    largest = max(map(abs, among))
    unit, suffix = next(((unit, suffix) for unit, suffix in _UNITS if 1000 * unit > largest >= unit), (1.0, ""))
    if largest >= 1e15 or 0 < largest < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+").replace("e+", "e")
    scaled = sorted(one / unit for one in among)
    digits = next(
        digits for digits in range(7) if digits == 6 or all(abs(round(one, digits) - one) < 1e-9 for one in scaled)
    )
    return f"{value / unit:.{digits}f}{suffix}" if value else "0"


def exact(value: float) -> str:
    """Returns a number with six significant digits; a dash for one that is not known.

    >>> exact(2.5), exact(1234567.0), exact(0.000012345678), exact(math.nan)
    ('2.5', '1,234,567', '1.23457e-05', '-')
    """
    if math.isnan(value):
        return "-"
    if value == round(value) and abs(value) < 1e15:
        return f"{round(value):,}"
    return f"{value:,.6g}" if abs(value) < 1e5 else f"{value:,.1f}" if abs(value) < 1e15 else f"{value:.6g}"


def count_text(count: int) -> str:
    """Returns a count, short if it is large.

    >>> count_text(12_345), count_text(4_204_000_000)
    ('12,345', '4.20B')
    """
    unit, suffix = next(((unit, suffix) for unit, suffix in _UNITS if count >= unit and unit > 1e3), (1.0, ""))
    return f"{count / unit:.2f}{suffix}" if suffix else f"{count:,}"


def duration(seconds: float) -> str:
    """Returns a duration in the units that suit its size.

    >>> duration(0.0042), duration(75.3), duration(5025), duration(200_000)
    ('4.2 ms', '1 min 15 s', '1 h 23 min', '2 d 7 h')
    """
    if math.isnan(seconds):
        return "-"
    for least, large, small, names in ((86400, 86400, 3600, "d h"), (3600, 3600, 60, "h min"), (60, 60, 1, "min s")):
        if seconds >= least:
            first, second = names.split()
            return f"{int(seconds // large)} {first} {int(seconds % large // small)} {second}"
    if 0 < abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def percent(share: float) -> str:
    """Returns a share as percentage.

    >>> percent(0.12345), percent(math.nan)
    ('12.35%', '-')
    """
    return "-" if math.isnan(share) else f"{share:.2%}"


def byte_unit(largest: float) -> tuple[float, str]:
    """Returns the unit for sizes up to the largest, in bytes, and its name.

    >>> byte_unit(5 * 2**30)
    (1073741824.0, 'GiB')
    """
    return next(((float(unit), name) for unit, name in _BYTES if largest >= unit), (1.0, "bytes"))


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the unit for an axis that spans these seconds, and its name.

    >>> time_unit(90), time_unit(86400)
    ((1.0, 'seconds'), (3600.0, 'hours'))
    """
    return next(((unit, name) for least, unit, name in _TIMES if seconds >= least), (1.0, "seconds"))


def moment(seconds: float | None) -> str:
    """Returns a time in UTC; a dash for one that is not known.

    >>> moment(0.25), moment(None)
    ('1970-01-01 00:00:00', '-')
    """
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
