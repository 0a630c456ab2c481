"""`trackbed seal`: creation of seals for pairs without one."""

import click

from trackbed.cli.parse import idx_cache_option


@click.command(short_help="Write checksums of pairs of .bin and .idx files.")
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
@idx_cache_option
def seal(prefixes: tuple[str, ...], *, idx_cache: str | None) -> None:
    """Write the seals (checksums) of pairs of .bin and .idx files as they are now.

    PREFIX is the path or address of a pair without .bin and .idx; or a list of shards (.toml), as preprocess writes it;
    or a folder: all pairs in it. With a seal, `trackbed verify --content` finds every later change. A damaged pair gets
    no seal.
    """
    from trackbed.cli.progress import cumulative, show_progress, size_of
    from trackbed.preprocess import find_pairs
    from trackbed.tokens import get_bin_path, get_idx_path, get_seal_path, verify
    from trackbed.tokens import seal as run

    pairs = find_pairs(prefixes)
    for pair in pairs:
        verify(pair, idx_cache=idx_cache)
    with show_progress("sealing") as progress:
        step = cumulative(progress, size_of(path(pair) for pair in pairs for path in (get_bin_path, get_idx_path)))
        for pair in pairs:
            run(pair, progress=step, idx_cache=idx_cache)
    for pair in pairs:
        click.echo(get_seal_path(pair))
