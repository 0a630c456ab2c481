"""Parameter types and options shared by several commands."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

MEGATRON: Final = "megatron-core"
_AMOUNT: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_BYTES: Final = {
    "": 1,
    "b": 1,
    **{f"{prefix}{end}": 1000**power for power, prefix in enumerate("kmgtp", start=1) for end in ("", "b")},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.5 on
    """A number of bytes such as 100GB, 1.5TB or 512MiB."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the value."""
        found = _AMOUNT.fullmatch(str(value).strip())
        if found is None or found["unit"].lower() not in _BYTES:
            self.fail(f"a size must be a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, found {value!r}")
        return int(float(found["number"]) * _BYTES[found["unit"].lower()])


class Input(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A path, or an address of an object store."""

    name = "input"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """Parses the value."""
        return value if isinstance(value, str) and _ADDRESS.match(value) else Path(value)


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A length of time such as 30d, 12h or 90m, in seconds."""

    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parses the value."""
        if isinstance(value, float):
            return value
        found = _AMOUNT.fullmatch(str(value).strip())
        if found is None or found["unit"] not in _SECONDS:
            self.fail(f"a duration must be a number with s, m, h, d or w, found {value!r}")
        return float(found["number"]) * _SECONDS[found["unit"]]


class Release(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """`megatron-core`, or a release of it, such as `megatron-core==0.19`; and further names."""

    name = "release"

    def __init__(self, *others: str) -> None:
        self._others = others

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the value, and returns it."""
        from trackbed.datasets.megatron_releases import COMPARED_WITH, is_newer_than_compared
        from trackbed.errors import ArgumentError

        name, has_release, release = value.partition("==")
        if value not in self._others and name != MEGATRON:
            wanted = ", ".join((*self._others, MEGATRON, f"or a release such as {MEGATRON}==0.19"))
            self.fail(f"must be {wanted}, found {value!r}")
        if has_release:
            try:
                is_newer = is_newer_than_compared(release)
            except ArgumentError as error:
                self.fail(str(error))
            if is_newer:
                told = f"{value} is newer than {COMPARED_WITH[-1]}, up to which Trackbed has been compared with it"
                click.echo(f"trackbed: warning: {told}", err=True)
        return value


def json_keys_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns the option for the keys of texts, with this help; lists such as `text,title` are split."""
    return click.option(
        "--json-keys",
        multiple=True,
        default=["text"],
        show_default=True,
        metavar="KEY[,KEY...]",
        callback=lambda _context, _option, given: tuple(key for keys in given for key in keys.split(",")),
        help=text,
    )


format_option = click.option(
    "--format",
    "input_format",
    type=click.Choice(["jsonl", "txt", "parquet"]),
    help="Format of every input, regardless of its suffix; a folder then stands for every file in it.",
)
"""Option for the format of inputs whose suffix does not state it."""

record_limit_option = click.option(
    "--max-record-bytes",
    type=Size(),
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Maximum size of one line, plain text or cell; a larger one is a bad record.",
)
"""Option for the limit that keeps one record from using all memory."""

idx_cache_option = click.option(
    "--idx-cache",
    metavar="FOLDER",
    help="For pairs at addresses such as s3://bucket/prefix: folder on this host for copies of their .idx; by default "
    "below ~/.cache.",
)
"""Option for the folder of copies of `.idx` objects."""
