"""Values on the command line that several commands take."""

import re
from typing import Final

import click

__all__ = ["Duration", "Size", "format_option", "record_limit_option", "split_keys"]

_AMOUNT: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_BYTES: Final = {
    "": 1,
    "b": 1,
    **{f"{prefix}{end}": 1000**power for power, prefix in enumerate("kmgtp", start=1) for end in ("", "b")},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.5 on
    """A number of bytes such as 100GB, 1.5TB or 512MiB."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002  click calls it so
        """The number that is meant."""
        found = _AMOUNT.fullmatch(str(value).strip())
        if found is None or found["unit"].lower() not in _BYTES:
            self.fail(f"a size must be a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, found {value!r}")
        return int(float(found["number"]) * _BYTES[found["unit"].lower()])


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A length of time such as 30d, 12h or 90m, in seconds."""

    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002  see Size
        """The number that is meant."""
        if isinstance(value, float):
            return value
        found = _AMOUNT.fullmatch(str(value).strip())
        if found is None or found["unit"] not in _SECONDS:
            self.fail(f"a duration must be a number with s, m, h, d or w, found {value!r}")
        return float(found["number"]) * _SECONDS[found["unit"]]


def split_keys(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:  # noqa: ARG001  click calls it so
    """The keys in lists like `text,title`."""
    return tuple(key for keys in given for key in keys.split(","))


format_option = click.option(
    "--format",
    "input_format",
    type=click.Choice(["jsonl", "txt", "parquet"]),
    help="What every input is, whatever its name; a folder then means every file in it.",
)
"""The layout of the inputs, where their names do not say it."""

record_limit_option = click.option(
    "--max-record-bytes",
    type=Size(),
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Size that one line, plain text or cell may have; a larger one is a bad record.",
)
"""The limit that keeps one record from taking all memory."""
