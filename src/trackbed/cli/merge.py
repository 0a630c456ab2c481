"""`trackbed merge`: merging of several pairs into one."""

import click

from trackbed.cli.parse import idx_cache_option

__all__ = ["merge"]


@click.command()
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
@click.option("--output", "-o", required=True, metavar="PREFIX", help="Prefix of the pair to write.")
@click.option("--multimodal", is_flag=True, help="The sequences have modes.")
@idx_cache_option
def merge(prefixes: tuple[str, ...], *, output: str, multimodal: bool, idx_cache: str | None) -> None:
    """Merge several pairs of .bin and .idx files into one.

    PREFIX is the path or address of a pair without .bin and .idx, or a folder: all pairs in it, sorted by name, except
    the output.
    """
    from trackbed.cli.progress import cumulative, show_progress, size_of
    from trackbed.preprocess import find_pairs
    from trackbed.tokens import get_bin_path
    from trackbed.tokens import merge as run

    pairs = find_pairs(prefixes, exclude=output)
    with show_progress("merging") as progress:
        step = cumulative(progress, size_of(map(get_bin_path, pairs)))
        run(pairs, output, multimodal=multimodal, progress=step, idx_cache=idx_cache)
    click.echo(f"pairs {len(pairs):,}\n{output}.bin\n{output}.idx")
