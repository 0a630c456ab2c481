"""`trackbed merge`: merging of several pairs into one."""

import click

from trackbed.cli.parse import idx_cache_option


@click.command()
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
@click.option(
    "--output", "-o", required=True, metavar="PREFIX", help="Prefix of the pair to write, or one of its files."
)
@click.option("--json-key", metavar="KEY", help="Key of the texts, if a list of shards has several.")
@click.option("--multimodal", is_flag=True, help="For pairs of texts and images, whose sequences have modes.")
@idx_cache_option
def merge(
    prefixes: tuple[str, ...], *, output: str, json_key: str | None, multimodal: bool, idx_cache: str | None
) -> None:
    """Merge several pairs of .bin and .idx files into one.

    PREFIX is the path or address of a pair without .bin and .idx; or a list of shards (.toml), as preprocess writes
    it; or a folder: all pairs in it, sorted by name, except the output. An existing output is replaced once the new one
    is complete.
    """
    from trackbed.cli.progress import cumulative, show_progress, size_of
    from trackbed.preprocess import find_pairs
    from trackbed.tokens import get_bin_path
    from trackbed.tokens import merge as run
    from trackbed.tokens.shard_list import SHARD_LIST_SUFFIX, read_shard_list

    output = output.removesuffix(".bin").removesuffix(".idx")  # one file of a pair stands for the pair
    lists = [name for name in prefixes if name.endswith(SHARD_LIST_SUFFIX)]
    if json_key is not None and not lists:
        raise click.UsageError("--json-key needs a list of shards")
    shards = {name: read_shard_list(name, key=json_key) for name in lists}
    names = [prefix for name in prefixes for prefix in shards.get(name, [name])]
    pairs = find_pairs(names, exclude=output)
    with show_progress("merging") as progress:
        step = cumulative(progress, size_of(map(get_bin_path, pairs)))
        run(pairs, output, multimodal=multimodal, progress=step, idx_cache=idx_cache)
    click.echo(f"pairs {len(pairs):,}\n{output}.bin\n{output}.idx")
