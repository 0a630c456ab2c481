"""`trackbed seal`: creation of seals for pairs without one."""

from pathlib import Path

import click

from trackbed.cli.parse import idx_cache_option
from trackbed.plural import number_of

_LOST = {"mask": ": all tokens are trained now", "src": ": documents have no sources now"}


@click.command(short_help="Write checksums of pairs of .bin and .idx files.")
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
@click.option(
    "--mask",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write PREFIX.mask, the trained tokens, from a file with a byte for each token, such as .lsm or .npy.",
)
@idx_cache_option
def seal(prefixes: tuple[str, ...], *, mask: Path | None, idx_cache: str | None) -> None:
    """Write the seals (checksums) of pairs of .bin and .idx files as they are now.

    PREFIX is the path or address of a pair without .bin and .idx; or a list of shards (.toml), as preprocess writes it;
    or a folder: all pairs in it. With a seal, `trackbed verify --content` finds every later change. A damaged pair gets
    no seal.

    With --mask, which needs one pair on a disk, FILE says which tokens are trained on: its bytes are 1 or 0, and each
    belongs to its own token.
    """
    from trackbed.cli.progress import cumulative, show_progress, size_of
    from trackbed.files.stores import is_address
    from trackbed.preprocess import find_pairs
    from trackbed.tokens import get_bin_path, get_idx_path, get_seal_path, verify
    from trackbed.tokens import seal as run
    from trackbed.tokens.foreign_masks import check_mask, take_mask
    from trackbed.tokens.paths import get_beside_path
    from trackbed.tokens.seal import missing_beside
    from trackbed.tokens.trained_tokens import TRAINED

    pairs = find_pairs(prefixes)
    if mask is not None and (len(pairs) != 1 or is_address(pairs[0])):
        raise click.UsageError("--mask needs one pair on a disk")
    for pair in pairs:
        verify(pair, idx_cache=idx_cache, beside=False)  # a new seal names what is there now
    if mask is not None:
        trained = take_mask(pairs[0], mask)
        click.echo(f"{get_beside_path(pairs[0], TRAINED)}: {number_of(trained, 'trained token')}")
    for pair in pairs:
        if not is_address(pair):
            check_mask(pair)
    for pair in pairs:
        for name in missing_beside(pair):
            lost = f"{get_beside_path(pair, name)}: the old seal names it, found none{_LOST.get(name, '')}"
            click.echo(f"trackbed: {lost}", err=True)
    with show_progress("sealing") as progress:
        step = cumulative(progress, size_of(path(pair) for pair in pairs for path in (get_bin_path, get_idx_path)))
        for pair in pairs:
            run(pair, progress=step, idx_cache=idx_cache)
    for pair in pairs:
        click.echo(get_seal_path(pair))
