"""`trackbed finish`: pairs whose writer ended while they appeared."""

import click

__all__ = ["finish"]


@click.command()
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
def finish(prefixes: tuple[str, ...]) -> None:
    """Complete pairs of .bin and .idx files whose writer was killed while it replaced them.

    PREFIX is the path of a pair without .bin and .idx. The new files are complete and get their final names; the pair
    is checked afterwards. A pair that needs nothing is only checked.
    """
    from trackbed.tokens import finish_pair, verify

    for prefix in prefixes:
        finished = finish_pair(prefix)
        verify(prefix)
        click.echo(f"{prefix}: {'finished' if finished else 'complete already'}")
