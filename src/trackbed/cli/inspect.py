"""`trackbed inspect`: the contents of a pair."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from trackbed.cli.output import is_utf8, json_text, mark_run, printable
from trackbed.cli.parse import idx_cache_option
from trackbed.errors import ArgumentError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.preprocess import FirstDocument, Inspection


_ASCII_WIDTH: Final = 40


@click.command(short_help="Show the contents of a pair of .bin and .idx files.")
@click.argument("prefixes", metavar="PREFIX...", nargs=-1)
@click.option("--tokenizer", metavar="TOKENIZER", help="Decode the first documents with it; as for preprocess.")
@click.option(
    "--eod-token",
    metavar="TOKEN",
    help="End-of-document token; needed if the tokenizer has none of the usual ones, <|endoftext|>, </s> and the like.",
)
@click.option(
    "--documents",
    type=click.IntRange(min=0),
    metavar="N",
    default=3,
    show_default=True,
    help="Number of documents to decode.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=64,
    show_default=True,
    help="Maximum tokens of each.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--counts-json",
    metavar="FILE",
    help="Only write the counts of all pairs to FILE, for the option sequences_per_dataset of a job.",
)
@click.option(
    "--limits", is_flag=True,
    help="Only show how many files a process may map and open here; of a PREFIX, how many maps its file system allows.",
)  # fmt: skip
@idx_cache_option
def inspect(
    prefixes: tuple[str, ...],
    *,
    limits: bool,
    tokenizer: str | None,
    eod_token: str | None,
    documents: int,
    max_tokens: int,
    as_json: bool,
    counts_json: str | None,
    idx_cache: str | None,
) -> None:
    """Show the contents of a pair of .bin and .idx files, or the counts of a list of shards.

    PREFIX is the path or address of the pair without .bin and .idx, or a folder with one pair (with --counts-json: any
    number), or a list of shards (.toml), as preprocess writes it.

    With --tokenizer, text that the mask of the pair leaves out of the loss stands in {- and -}.
    """
    from trackbed.preprocess import find_pairs, first_documents, inspect_pair, open_tokenizer
    from trackbed.preprocess.pairs import is_list_name

    if limits:
        if as_json:
            raise click.UsageError("--limits has no --json")
        _show_limits(prefixes)
        return
    if not prefixes:
        raise click.UsageError("Missing argument 'PREFIX...'.")
    if counts_json is not None:
        _write_counts(find_pairs(prefixes), counts_json, idx_cache)
        return
    if tokenizer is None and eod_token is not None:
        raise click.UsageError("--eod-token needs --tokenizer")
    if len(prefixes) == 1 and is_list_name(prefixes[0]):
        if tokenizer is not None:
            raise click.UsageError("--tokenizer needs a pair, found a list of shards")
        _show_shards(prefixes[0], idx_cache, as_json=as_json)
        return
    pair, *others = find_pairs(prefixes)
    if others:
        raise click.UsageError(
            f"PREFIX must be one pair without --counts-json, {' '.join(prefixes)} has {1 + len(others)}"
        )
    inspection = inspect_pair(pair, idx_cache=idx_cache)
    first = None
    if tokenizer is not None:
        decoder = open_tokenizer(tokenizer, eod_token=eod_token)
        shown = {"num_documents": documents, "max_tokens": max_tokens}
        first = first_documents(pair, decoder, **shown, idx_cache=idx_cache)
    if as_json:
        click.echo(_to_json(inspection, first))
    else:
        _draw(inspection, first or [])


def _show_limits(names: tuple[str, ...]) -> None:
    """Prints the limits of a process, and the number of maps that the file systems of some pairs allow."""
    from trackbed.files import DESCRIPTORS, MAPS, count_maps
    from trackbed.files.stores import is_address
    from trackbed.preprocess import find_pairs
    from trackbed.tokens.paths import get_idx_path

    for name in names:
        if is_address(name):
            raise ArgumentError(f"{name}: must be a pair in a file system with --limits, as objects are not mapped")
    click.echo(f"memory maps: up to {MAPS.max_open:,}, half of vm.max_map_count")
    click.echo(f"open files: up to {DESCRIPTORS.max_open:,}, half of ulimit -n")
    for prefix in find_pairs(names):
        found, reason = count_maps(get_idx_path(prefix), MAPS.max_open)
        end = f"refuses more: {reason}" if reason else "allows as many maps as a process takes"
        click.echo(f"{prefix}: maps {found:,}, its file system {end}")


def _show_shards(path: str, idx_cache: str | None, *, as_json: bool) -> None:
    """Prints a line for each key of a list of shards."""
    from dataclasses import asdict

    from trackbed.preprocess import count_shards

    groups = count_shards(path, idx_cache=idx_cache)
    if as_json:
        fields = {"path": path, "keys": [asdict(one) for one in groups]}
        click.echo(json_text(fields))
        return
    for one in groups:
        click.echo(
            f"{path}{f', key {one.key}' if one.key else ''}: shards {one.shards:,}, documents {one.documents:,}, "
            f"tokens {one.tokens:,} of {one.dtype}"
        )


def _write_counts(pairs: list[str], path: str, idx_cache: str | None) -> None:
    """Writes the numbers of sequences and document borders of each pair, from the headers of the indices."""
    from trackbed.files import new_partial, publish, write_new
    from trackbed.tokens.content import PairContent

    counts = {}
    for pair in pairs:
        index = PairContent.open(pair, idx_cache=idx_cache).index
        counts[pair] = [index.sequence_count, index.document_count]
    partial = new_partial(Path(path))
    try:
        write_new(partial, (json.dumps(counts, indent=1) + "\n").encode())
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    click.echo(f"{path}: counts of {number_of(len(counts), 'pair')}")


def _to_json(found: "Inspection", first: "list[FirstDocument] | None") -> str:
    from dataclasses import asdict

    fields: dict[str, Any] = asdict(found)
    if first is not None:
        documents = [asdict(one) for one in first]
        fields["first_documents"] = [{key: one[key] for key in one if one[key] is not None} for one in documents]
    return json_text(fields)


def _draw(inspection: "Inspection", first: "list[FirstDocument]") -> None:
    from rich import box
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    click.echo(
        f"{inspection.prefix}\n"
        f"documents {inspection.documents:,}, sequences {inspection.sequences:,}, "
        f"tokens {inspection.tokens:,} of {inspection.dtype}\n"
        f"{_modes(inspection)}"
        f".bin {inspection.bin_bytes:,} bytes, .idx {inspection.idx_bytes:,} bytes"
    )
    if inspection.trained is not None:
        click.echo(_trained(inspection))
    if inspection.documents:
        mean = inspection.tokens / inspection.documents
        click.echo(
            f"documents of {inspection.shortest:,} to {number_of(inspection.longest, 'token')}, {mean:,.1f} on average"
        )
        most = max(bin_.documents for bin_ in inspection.histogram)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("documents", justify="right", no_wrap=True)
        table.add_column("", ratio=1)
        for bin_ in inspection.histogram:
            span = f"{bin_.shortest:,}" if bin_.shortest == bin_.longest else f"{bin_.shortest:,} to {bin_.longest:,}"
            bar = Bar(most, 0, bin_.documents) if is_utf8() else "#" * -(-_ASCII_WIDTH * bin_.documents // most)
            table.add_row(span, f"{bin_.documents:,}", bar)
        console.print(table)
    for number, document in enumerate(first):
        click.echo(f"document {number}, tokens {document.tokens:,}:")
        runs = [(document.text, True)] if document.runs is None else [(one.text, one.counts) for one in document.runs]
        text = "".join(mark_run(printable(text), counts=counts) for text, counts in runs)
        click.echo(f"  {text}{'' if document.whole else ' ...'}")


def _trained(inspection: "Inspection") -> str:
    """Says how many tokens are trained.

    Labels are the trained tokens without first ones, which nothing precedes.
    """
    found = inspection.trained
    if found is None:
        return ""
    share = f", {found.tokens / inspection.tokens:.1%}" if inspection.tokens else ""
    return (
        f"trained tokens {found.tokens:,}{share}; {found.first_tokens:,} of them begin their document, and are no "
        f"labels; documents without a label {found.untrained:,}"
    )


def _modes(found: "Inspection") -> str:
    if not found.modes:
        return ""
    return ", ".join(f"sequences of mode {mode} {count:,}" for mode, count in found.modes.items()) + "\n"
