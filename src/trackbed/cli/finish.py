"""`trackbed finish`: completion of pairs whose writer was interrupted."""

import click


@click.command(short_help="Complete pairs of .bin and .idx files after a kill.")
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
def finish(prefixes: tuple[str, ...]) -> None:
    """Complete pairs of .bin and .idx files whose writer was killed while it replaced them.

    PREFIX is the path of a pair without .bin and .idx. The new files are complete and only have to be renamed; the
    pair is checked afterwards. A pair that is complete already is only checked.
    """
    from trackbed.tokens import finish_pair, verify

    for prefix in prefixes:
        finished = finish_pair(prefix)
        verify(prefix)
        click.echo(f"{prefix}: {'finished' if finished else 'complete already'}")
