"""Report of `trackbed preprocess`."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trackbed.preprocess import Report

__all__ = ["show_report"]


def show_report(report: "Report", seconds: float, *, split_sentences: bool) -> None:
    """Prints the counts of a run that took `seconds`, and the paths of what it wrote."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    for message in report.first_bad:
        click.echo(f"trackbed: skipped {message}", err=True)
    if report.bad > len(report.first_bad):
        click.echo(f"trackbed: and {report.bad - len(report.first_bad):,} more", err=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("key", overflow="fold")
    has_unknown = any(one.unknown is not None for one in report.outputs)
    names = ["documents", *["sentences"] * split_sentences, "tokens", *["unknown"] * has_unknown, "dropped"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.outputs:
        sequences = [f"{one.sequences:,}"] if split_sentences else []
        unknown = [_share(one.unknown or 0, one.tokens)] if has_unknown else []
        table.add_row(one.key, f"{one.documents:,}", *sequences, f"{one.tokens:,}", *unknown, f"{one.dropped:,}")
    Console(markup=False, highlight=False).print(table)
    if any(one.dropped for one in report.outputs):
        click.echo("dropped: texts without tokens, such as empty ones, which become no document")
    click.echo(
        f"records {report.records:,}, bad {report.bad:,}, blank lines {report.blank:,}, files {report.files:,}"
        f"{_skipped_files(report)}\n"
        f"{_amount(report)} in {seconds:.1f} s{_rate(report, seconds)}"
    )
    if report.shard_list is not None:
        failed = f", failed attempts {report.failed_attempts:,}" if report.failed_attempts else ""
        click.echo(f"shards {report.shards:,}, finished before {report.finished_shards:,}{failed}\n{report.shard_list}")
        return
    for one in report.outputs:
        click.echo(f"{one.prefix}.bin\n{one.prefix}.idx")


def _share(part: int, whole: int) -> str:
    """Formats the share of unknown tokens.

    >>> _share(0, 9), _share(1, 1_000_000), _share(1, 8)
    ('0%', '<0.01%', '12.50%')
    """
    if not part:
        return "0%"
    return f"{part / whole:.2%}" if part / whole >= 0.0001 else "<0.01%"


def _amount(report: "Report") -> str:
    parts = [f"{report.input_bytes / 1e6:,.1f} MB"]
    if report.text_bytes is not None:
        parts = [f"stored {parts[0]}", f"unpacked {report.text_bytes / 1e6:,.1f} MB"]
    if report.kept_bytes:
        parts.append(f"kept from before {report.kept_bytes / 1e6:,.1f} MB")
    return ", ".join(parts) + ("," if len(parts) > 1 else "")


def _rate(report: "Report", seconds: float) -> str:
    """Returns the stored bytes a second of this run; empty if an earlier run has done all of them."""
    done = report.input_bytes - report.kept_bytes
    return f", {done / 1e6 / seconds:.1f} MB/s" if done or not report.kept_bytes else ""


def _skipped_files(report: "Report") -> str:
    if not report.left_out_files:
        return ""
    return f", files of unknown suffix skipped {report.left_out_files:,}"
