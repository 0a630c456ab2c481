"""`trackbed cache`: listing, verification and garbage collection of a cache."""

import json
import time
from typing import TYPE_CHECKING, Any

import click

from trackbed.cli.parse import Duration, Size
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.cache import Inventory, Removal, StoredEntry


_DAY = 86_400.0
_NAME_CHARS = 8
"""Characters of the name of an entry in the table, which is the MD5 of its description."""


@click.group()
def cache() -> None:
    """List, check and clean a folder of indices."""


_FOLDER = click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False))


@cache.command()
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(folder: str, *, as_json: bool) -> None:
    """List the entries of a cache, most recently used first."""
    from trackbed.cache import take_inventory

    inventory = take_inventory(folder)
    entries = sorted(inventory.entries, key=lambda entry: -entry.last_used)
    if as_json:
        partials = [{"path": partial.path, "writer": partial.writer.name} for partial in inventory.partials]
        fields = {"folder": folder, "size_bytes": inventory.size_bytes, "entries": [*map(_fields, entries)]}
        click.echo(json.dumps({**fields, "partials": partials}, ensure_ascii=False, indent=1))
        return
    _draw(entries)
    click.echo(f"{number_of(len(entries), 'entry', 'entries')}, {_size(inventory.size_bytes)}")
    for what in ("dead", "living", "elsewhere"):
        count = sum(partial.writer.name == what for partial in inventory.partials)
        if count:
            click.echo(f"{number_of(count, 'partial file', 'partial files')}, writer {what}")


@cache.command()
@_FOLDER
@click.pass_context
def verify(ctx: click.Context, folder: str) -> None:
    """Read every byte of a cache, and compare it with the manifests.

    Entries without a manifest are checked by their headers. Prints a line for each problem; the exit status is 1 if
    there is any.
    """
    from trackbed.cache import Condition, bytes_to_read, find_problems, take_inventory
    from trackbed.cli.progress import cumulative, show_progress

    inventory = take_inventory(folder)
    with show_progress("verifying") as progress:
        problems = list(find_problems(inventory, progress=cumulative(progress, bytes_to_read(inventory))))
    for problem in problems:
        click.echo(f"trackbed: {problem}", err=True)
    if problems:
        ctx.exit(1)
    unknown = sum(entry.condition is Condition.unknown for entry in inventory.entries)
    bare = sum(entry.manifest is None for entry in inventory.entries)
    kinds = [(unknown, "of another version, not checked"), (bare, "without a manifest, checked by headers")]
    notes = "".join(f"; {count:,} {what}" for count, what in kinds if count)
    click.echo(
        f"{folder}: ok: {number_of(len(inventory.entries), 'entry', 'entries')}, {_size(inventory.size_bytes)}{notes}"
    )


@cache.command()
@_FOLDER
@click.option(
    "--keep", "keep_bytes", type=Size(), metavar="SIZE", help="Stop when the cache has at most this size: 100GB."
)
@click.option(
    "--unused-for", type=Duration(), metavar="TIME", help="Remove only entries unused for this long: 30d, 12h."
)
@click.option("--foreign", is_flag=True, help="Also remove entries of Megatron Core, and of other versions.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
def gc(folder: str, *, keep_bytes: int | None, unused_for: float | None, foreign: bool, dry_run: bool) -> None:
    """Remove the least recently used entries of a cache.

    Give --keep, --unused-for, or both; with --keep alone, entries used within a day stay. Entries that a process of
    this host has mapped stay, too. Partial files of dead processes are always removed, of other hosts after seven days.
    """
    from trackbed.cache import entries_in_use, plan_removal, remove, take_inventory

    if keep_bytes is None and unused_for is None:
        raise click.UsageError("state what to remove: --keep SIZE, --unused-for TIME, or both")
    inventory = take_inventory(folder)
    removal = plan_removal(
        inventory,
        now=time.time(),
        keep_bytes=keep_bytes or 0,
        unused_for_seconds=_DAY if unused_for is None else unused_for,
        in_use=entries_in_use(inventory),
        foreign=foreign,
    )
    if not dry_run:
        remove(removal)
    _report(inventory, removal, "would remove" if dry_run else "removed")
    if keep_bytes is not None and removal.left_bytes > keep_bytes:
        click.echo(
            f"trackbed: {folder}: {_size(removal.left_bytes)} stay, more than {_size(keep_bytes)}: they are in use, "
            "were used too recently (see --unused-for), or are not known to be Trackbed's (see --foreign)",
            err=True,
        )


def _report(found: "Inventory", removal: "Removal", verb: str) -> None:
    for entry in removal.entries:
        click.echo(f"{verb} {entry.path}: {_size(entry.size_bytes)}, last used {_day(entry.last_used)}")
    if removal.partials:
        click.echo(f"{verb} {number_of(len(removal.partials), 'partial file', 'partial files')}")
    stay = len(found.entries) - len(removal.entries)
    click.echo(
        f"{verb} {number_of(len(removal.entries), 'entry', 'entries')}, {_size(removal.size_bytes)}; "
        f"{stay:,} {'stays' if stay == 1 else 'stay'}, {_size(removal.left_bytes)}"
    )


def _fields(entry: "StoredEntry") -> dict[str, Any]:
    """Returns an entry as JSON values."""
    from trackbed.cache import describe_stored

    described = describe_stored(entry)
    return {
        "path": entry.path,
        "dataset": described.dataset,
        "class": described.class_name,
        "split": described.split,
        "fingerprint": entry.fingerprint,
        "is_aside": entry.is_aside,
        "has_manifest": entry.manifest is not None,
        "size_bytes": entry.size_bytes,
        "last_used": entry.last_used,
        "condition": entry.condition.name,
        "problems": entry.problems,
        "files": [file.path for file in entry.files],
    }


def _draw(entries: "list[StoredEntry]") -> None:
    from rich import box
    from rich.table import Table

    from trackbed.cache import describe_stored
    from trackbed.cli.output import table_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("dataset", overflow="fold", min_width=12)
    for column in ("split", "class", "entry"):
        table.add_column(column, no_wrap=True)
    for column in ("place", "size", "last used", "state"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        state = entry.condition.value if entry.manifest is not None else f"{entry.condition.value}, no manifest"
        place = f"{entry.directory.rpartition('/')[2][:8]}" if entry.is_aside else "shared"
        dataset, split, class_name = describe_stored(entry)
        name = entry.stem[:_NAME_CHARS]
        table.add_row(dataset, split, class_name, name, place, _size(entry.size_bytes), _day(entry.last_used), state)
    table_console().print(table)


def _day(seconds: float) -> str:
    """Formats a time in seconds since 1970, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _size(size_bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(size_bytes)
