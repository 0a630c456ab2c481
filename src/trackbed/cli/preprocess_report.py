"""Report of `trackbed preprocess`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.preprocess import Output, Report


_REASONS: Final = {"unknown suffix": "of unknown suffix", "written by trackbed": "written by Trackbed"}
_NAMES_SHOWN: Final = 3


def report_as_json(report: "Report", seconds: float) -> str:
    """Returns all counts of a run, and the names of what it read and left out."""
    return json.dumps({**asdict(report), "seconds": round(seconds, 3)}, ensure_ascii=False, indent=1)


def files_line(formats: Mapping[str, Sequence[str]], left_out: Mapping[str, Sequence[str]]) -> str:
    """Formats what was read and what not; names the first files of each format but the most frequent one.

    >>> files_line({"jsonl": ["a/0.jsonl", "a/1.jsonl"], "text": ["a/README.md"]}, {"hidden": ["a/_tmp"]})
    'files: 2 JSON lines, 1 text (a/README.md); left out: 1 hidden (a/_tmp)'
    """
    from trackbed.preprocess.inputs import FORMAT_NAMES, InputFormat

    read = [
        f"{len(names):,} {FORMAT_NAMES[InputFormat(name)]}{_first(names) if number else ''}"
        for number, (name, names) in enumerate(formats.items())
    ]
    skipped = [f"{len(names):,} {_REASONS.get(reason, reason)}{_first(names)}" for reason, names in left_out.items()]
    return f"files: {', '.join(read)}" + (f"; left out: {', '.join(skipped)}" if skipped else "")


def _first(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return f" ({', '.join(names[:_NAMES_SHOWN])}{more})"


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
    has_unknown = any(output.unknown is not None for output in report.outputs)
    has_empty = any(output.empty for output in report.outputs)
    names = ["documents", *["sentences"] * split_sentences, "tokens", *["unknown"] * has_unknown]
    names += [*["empty"] * has_empty, "dropped"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for output in report.outputs:
        sequences = [f"{output.sequences:,}"] if split_sentences else []
        unknown = [_share(output.unknown or 0, output.tokens)] if has_unknown else []
        empty = [f"{output.empty:,}"] if has_empty else []
        table.add_row(
            output.key,
            f"{output.documents:,}",
            *sequences,
            f"{output.tokens:,}",
            *unknown,
            *empty,
            f"{output.dropped:,}",
        )
    Console(markup=False, highlight=False).print(table)
    if has_empty:
        click.echo(
            "empty: texts without tokens, each a sequence without text, so that the documents of all keys correspond"
        )
    if any(output.dropped for output in report.outputs):
        click.echo(
            "dropped: texts without tokens, such as empty ones, which become no document"
            if len(report.outputs) == 1
            else "dropped: texts of records in which one has no tokens, such as an empty one"
        )
    for output in report.outputs:
        _show_trained(output)
    click.echo(
        f"records {report.records:,}, bad {report.bad:,}, blank lines {report.blank:,}, files {report.files:,}\n"
        f"{files_line(report.formats, report.left_out)}\n"
        f"{_amount(report)} in {seconds:.1f} s{_rate(report, seconds)}"
    )
    if report.shard_list is not None:
        failed = f", failed attempts {report.failed_attempts:,}" if report.failed_attempts else ""
        click.echo(f"shards {report.shards:,}, finished before {report.finished_shards:,}{failed}\n{report.shard_list}")
        return
    for output in report.outputs:
        mask = f"\n{output.prefix}.mask" if output.trained is not None else ""
        click.echo(f"{output.prefix}.bin\n{output.prefix}.idx{mask}")


def _show_trained(output: "Output") -> None:
    """Prints what is trained on of conversations."""
    if output.trained is None:
        return
    click.echo(f"trained: {output.trained:,} tokens, {_share(output.trained, output.tokens)}")
    if output.untrained:
        click.echo(f"left out: {number_of(output.untrained, 'conversation')} of which no token is trained")
    if output.open_turns:
        click.echo(
            f"trackbed: {number_of(output.open_turns, 'trained part')} without a special token at the end, such as "
            "<|im_end|>: the model would not learn to stop; let {% endgeneration %} stand behind the token that ends "
            "a turn, or give --append-eod for texts and completions",
            err=True,
        )


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
