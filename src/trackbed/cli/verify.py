"""`trackbed verify`: checks of pairs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from trackbed.cli.output import EXPECTED, describe
from trackbed.cli.parse import idx_cache_option

if TYPE_CHECKING:
    from trackbed.tokens import Verified


@click.command()
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
@click.option("--content", is_flag=True, help="Also compare every byte with the seal.")
@idx_cache_option
@click.pass_context
def verify(ctx: click.Context, prefixes: tuple[str, ...], *, content: bool, idx_cache: str | None) -> None:
    """Check pairs of .bin and .idx files.

    PREFIX is the path or address of a pair without .bin and .idx; or a list of shards (.toml), as preprocess writes it;
    or a folder: all pairs in it. Each pair is checked, even if others are damaged.

    Header, sizes, lengths and document borders are checked; with --content, every byte. The exit status is 1 if a pair
    is damaged.
    """
    from trackbed.cli.progress import cumulative, show_progress, size_of
    from trackbed.preprocess import find_pairs
    from trackbed.tokens import get_bin_path, get_idx_path
    from trackbed.tokens import verify as check
    from trackbed.tokens import verify_content as check_content

    pairs = find_pairs(prefixes)
    if not content:
        results = [_report(pair, lambda prefix: check(prefix, idx_cache=idx_cache)) for pair in pairs]
    else:
        with show_progress("verifying") as progress:
            total = size_of(path(pair) for pair in pairs for path in (get_bin_path, get_idx_path))
            step = cumulative(progress, total)
            results = [
                _report(pair, lambda prefix: check_content(prefix, progress=step, idx_cache=idx_cache))
                for pair in pairs
            ]
    if not all(results):
        ctx.exit(1)


def _report(pair: str, check: "Callable[[str], Verified]") -> bool:
    """Checks a pair, and prints one line about it. Returns True if it is valid."""
    from trackbed.tokens import get_seal_path

    try:
        result = check(pair)
    except EXPECTED as error:
        unsealed = isinstance(error, FileNotFoundError) and error.filename == get_seal_path(pair)
        hint = f"; `trackbed seal {pair}` creates one for the current files" if unsealed else ""
        click.echo(f"trackbed: {describe(error)}{hint}", err=True)
        return False
    click.echo(
        f"{pair}: ok: documents {result.documents:,}, sequences {result.sequences:,}, "
        f"tokens {result.tokens:,} of {result.dtype}"
    )
    return True
