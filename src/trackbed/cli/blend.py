"""`trackbed blend`: the plan of a blend file."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trackbed.cli.output import json_text
from trackbed.cli.parse import Release, idx_cache_option
from trackbed.errors import ArgumentError

if TYPE_CHECKING:
    from trackbed.blends import BlendPlan


class _Count(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.5 on
    """Parameter type of a whole number such as 300_000, 20M, 1.5B or 2T."""

    name = "count"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the number."""
        from trackbed.blends import parse_count

        try:
            count = parse_count(str(value))
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        if count < 1:
            self.fail(f"a budget must be at least 1, found {count}", param, ctx)
        return count


@click.command(
    short_help="Show the plan of a blend file, or write such a file.",
    epilog="\b\nExamples:\n  trackbed blend blend.toml --tokens 2T\n"
    "  trackbed blend --from-megatron '--data-path web_text_document' blend.toml",
)
@click.argument("path", metavar="[BLEND.toml]", required=False, type=click.Path(dir_okay=False))
@click.option(
    "--from-megatron", metavar="ARGUMENTS",
    help="Write a new BLEND.toml from the arguments of a Megatron-LM job, all in quotes; without BLEND.toml, print it.",
)  # fmt: skip
@click.option(
    "--for", "reader", type=Release(), metavar="megatron-core==RELEASE",
    help="With --from-megatron: release of the job, whose tokenizers differ; by default 0.16.1.",
)  # fmt: skip
@click.option("--tokens", type=_Count(), metavar="COUNT", help="Number of tokens to train on, such as 2T, 1.5B or 20M.")
@click.option("--samples", type=_Count(), metavar="COUNT", help="Number of samples to train on.")
@click.option("--all", "show_all", is_flag=True, help="Show every row, not only the largest ones.")
@click.option("--members", is_flag=True, help="Show each pair of a glob in a row of its own.")
@click.option("--plot", metavar="FILE", help="Plot proportions and epochs to a .svg, .png or .pdf file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@idx_cache_option
def blend(
    path: str | None,
    *,
    from_megatron: str | None,
    reader: str | None,
    tokens: int | None,
    samples: int | None,
    show_all: bool,
    members: bool,
    plot: str | None,
    as_json: bool,
    idx_cache: str | None,
) -> None:
    """Show the plan of a blend file, or write one (--from-megatron). Builds nothing.

    BLEND.toml lists datasets, weights and sizes. Shows the documents and tokens of each dataset in each split, the
    samples and epochs that a run takes from it, and the proportions of each stage. The exit status is 1 if a dataset
    falls short.
    """
    from trackbed.blends import measure_blend, plan_blend, read_blend_file, samples_for

    if from_megatron is not None:
        if as_json or show_all or members or plot is not None or tokens is not None or samples is not None:
            raise click.UsageError("--from-megatron excludes the options of the plan")
        _convert(from_megatron, path, reader)
        return
    if reader is not None:
        raise click.UsageError("--for needs --from-megatron")
    if path is None or not Path(path).exists():
        raise click.UsageError(
            "Missing argument 'BLEND.toml'."
            if path is None
            else f"Invalid value for 'BLEND.toml': File '{path}' does not exist."
        )
    if tokens is not None and samples is not None:
        raise click.UsageError("--tokens and --samples exclude each other")
    file = read_blend_file(path).with_idx_cache(idx_cache)
    if tokens is not None:
        samples = samples_for(tokens, file.sequence_length)
    if samples is not None:
        file = file.with_train_samples(samples)
    measured = measure_blend(file)
    if file.tokenizer is not None:
        measured.tokenizer()
    plan = plan_blend(measured)
    if plot is not None:  # before the tables, whose reader may leave early
        from trackbed.cli.blend_table import draw_plan

        draw_plan(plan, plot)
    if as_json:
        click.echo(_to_json(plan))
    else:
        from trackbed.cli.blend_table import show_plan

        show_plan(plan, show_all=show_all, members=members)
    plan.problems.stop()
    if file.tokenizer is None and not as_json:
        click.echo(f"trackbed: {path} names no tokenizer; the plan needs none, builds and training do", err=True)


def _convert(arguments: str, path: str | None, reader: str | None) -> None:
    """Prints the blend file of a job's arguments, or writes it to a new file."""
    from trackbed.megatron.blend_arguments.blend_of_arguments import blend_of_megatron_arguments

    release = (reader or "").partition("==")[2]
    given = {"release": release} if release else {}
    text = blend_of_megatron_arguments(arguments, folder="." if path is None else Path(path).parent, **given)
    for line in text.splitlines():
        if line.startswith("# --"):
            click.echo(f"note: {line[2:]}", err=True)
    if path is None:
        click.echo(text, nl=False)
        return
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                Path(path).unlink()
                raise
    except FileExistsError:
        raise ArgumentError(f"{path}: must not exist yet, found a file there") from None
    click.echo(f"{path} is written; trackbed blend {path} shows its plan")


def _to_json(plan: "BlendPlan") -> str:
    from dataclasses import asdict

    splits = [asdict(split) for split in plan.splits]
    fields = {"order": plan.order, "sequence_length": plan.sequence_length, "splits": splits}
    return json_text(fields)
