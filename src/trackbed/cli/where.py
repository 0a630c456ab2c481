"""`trackbed where`: in which samples, and in which steps of a run, a document is read."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trackbed.cli.output import json_text
from trackbed.cli.parse import idx_cache_option
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.blends import BlendFile


@click.command(short_help="Say in which samples a document is read.")
@click.argument("prefix")
@click.argument("document", type=click.IntRange(min=0))
@click.option(
    "--blend", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="BLEND.toml",
    help="Blend whose samples are searched.",
)  # fmt: skip
@click.option(
    "--run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN",
    help="Folder of a run: say in which steps of it the document was read, and will be.",
)  # fmt: skip
@click.option(
    "--split", type=click.Choice(["train", "valid", "test"]), default="train", show_default=True,
    help="Part of the blend that is searched.",
)  # fmt: skip
@click.option("--cache", metavar="FOLDER", help="Folder of the indices, instead of the file's `cache`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@idx_cache_option
def where(
    prefix: str,
    document: int,
    *,
    blend: Path | None,
    run: Path | None,
    split: str,
    cache: str | None,
    as_json: bool,
    idx_cache: str | None,
) -> None:
    """Say in which samples of a blend a DOCUMENT of the pair PREFIX is read, and in which steps of a run.

    Computed from indices alone; missing ones are built. Later steps are those of a run that goes on with the batch size
    of its last step.
    """
    if (blend is None) == (run is None) or (run is not None and split != "train"):
        raise click.UsageError("--blend or --run must be given, and --split only with --blend")
    from trackbed.blends import read_blend_file
    from trackbed.cli.blend_split import open_split
    from trackbed.cli.show_step import find_last_blend
    from trackbed.loading.occurrences import find_document

    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    file: BlendFile
    file = read_blend_file(str(blend)).with_idx_cache(idx_cache) if run is None else find_last_blend(run, idx_cache)
    dataset = open_split(file, split, cache)
    positions = find_document(dataset, prefix, document).tolist()
    found: dict[str, Any] = {"prefix": prefix, "document": document, "samples": positions}
    if run is not None:
        found |= _steps(run, positions)
    if as_json:
        click.echo(json_text(found))
        return
    click.echo(f"{prefix}, document {document:,}: in {number_of(len(positions), 'sample')} of {split}")
    if not positions:
        click.echo("  it belongs to another split, has no tokens, or comes behind the last sample")
    if run is None:
        for position in positions:
            click.echo(f"  sample {position:,}")
        return
    for name, word in (("read", "was read in step"), ("coming", "will be read in step")):
        for step, position in found[name]:
            click.echo(f"  {word} {step:,}, sample {position:,}")


def _steps(run: Path, positions: list[int]) -> dict[str, Any]:
    """Returns pairs of step and position: those of the steps that count, and those that are to come."""
    from trackbed.cli.show_step import may_have, samples_of_step
    from trackbed.ledger import read_run
    from trackbed.loading.skipped import Skipped

    record, wanted = read_run(run), set(positions)
    read = []
    for line, job in zip(record.steps, record.jobs, strict=True):
        if may_have(run, line, job, positions):
            read += [[line["step"], position] for position in samples_of_step(run, line, job) if position in wanted]
    if not record.steps:
        return {"read": [], "coming": []}
    line, job = record.steps[-1], record.jobs[-1]
    if not line.get("num_samples"):
        return {"read": read, "coming": []}
    stop = max(samples_of_step(run, line, job), default=-1) + 1
    skipped, size = Skipped(job.get("skip", [])), line["num_samples"]
    kept = [(position, skipped.num_kept(position)) for position in positions if position >= stop]
    before = skipped.num_kept(stop)
    coming = [
        [line["step"] + 1 + (number - before) // size, position]
        for position, number in kept
        if size and skipped.num_kept(position + 1) > number
    ]
    return {"read": read, "coming": coming}
