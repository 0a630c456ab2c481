"""`trackbed report`: one page on a training run."""

from pathlib import Path

import click

from trackbed.cli.output import printable


@click.command(short_help="Write a page on a training run.")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Path of the page, by default report.html in the folder of the run.",
)  # fmt: skip
def report(run: Path, *, output: Path | None) -> None:
    """Write a page on a training run, from the record in the folder RUN.

    The page shows losses, tokens against the blend, restarts and waits. It is one HTML file that needs no other file
    and no network. The run may go on meanwhile.
    """
    from trackbed.report.write import write_report

    path = write_report(run, output)
    click.echo(f"{printable(str(path))}: {path.stat().st_size:,} bytes")
