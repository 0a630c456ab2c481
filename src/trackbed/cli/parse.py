"""Values on the command line that several commands take."""

import click

__all__ = ["split_keys"]


def split_keys(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:  # noqa: ARG001  click calls it so
    """The keys in lists like `text,title`."""
    return tuple(key for keys in given for key in keys.split(","))
