"""`trackbed export`: samples of a blend in the formats of other projects."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trackbed.cli.output import printable
from trackbed.cli.parse import idx_cache_option
from trackbed.errors import ArgumentError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.loading.packed_parquet import PackedParquetReport

_NAMES = {"train": "training", "valid": "validation", "test": "test"}
"""Begin of the name of each split's file, in Megatron-Bridge's words."""


@click.group()
def export() -> None:
    """Write samples of a blend in the formats of other projects."""


@export.command("packed-parquet", short_help="Write packs as packed Parquet of Megatron-Bridge.")
@click.argument("path", metavar="BLEND.toml", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FOLDER|FILE", required=True,
    help="File whose name ends in .idx.parquet, or a folder for a file such as training_4096.idx.parquet.",
)  # fmt: skip
@click.option(
    "--split", type=click.Choice(["train", "valid", "test"]), default="train", show_default=True,
    help="Part of the blend to write.",
)  # fmt: skip
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Number of samples, by default all.")
@click.option(
    "--eos-id", type=click.IntRange(min=0), metavar="ID",
    help="End token of the tokenizer that Megatron-Bridge is run with, which also pads; by default that of the blend.",
)  # fmt: skip
@click.option("--cache", metavar="FOLDER", help="Folder of the indices, instead of the file's `cache`.")
@idx_cache_option
def packed_parquet(
    path: str,
    *,
    output: Path,
    split: str,
    samples: int | None,
    eos_id: int | None,
    cache: str | None,
    idx_cache: str | None,
) -> None:
    """Write the samples of a blend in the order "packed" as packed Parquet of Megatron-Bridge.

    Bridge's packed_train_data_path takes the file, with packed_sequence_size the sequence length and pad_seq_to_mult
    the pack_multiple of the blend; its packed_metadata_path takes the .metadata.json beside it.
    """
    from trackbed.blends import read_blend_file
    from trackbed.cli.blend_split import open_split
    from trackbed.cli.progress import show_progress
    from trackbed.loading.packed_parquet import SUFFIXES, write_packed_parquet

    if output.name.endswith((".parquet", ".pq")) and not output.name.endswith(SUFFIXES):
        raise click.UsageError(f"--output must be a folder or end in {' or '.join(SUFFIXES)}, found {output}")
    dataset = open_split(read_blend_file(path).with_idx_cache(idx_cache), split, cache)
    if getattr(dataset.config, "order", None) != "packed":
        raise ArgumentError(f"{path}: order must be 'packed' to export packs, found {dataset.config.order!r}")
    if samples is not None and samples > len(dataset):
        raise ArgumentError(
            f"{path}: --samples must be at most {len(dataset)}, the samples of {split}, found {samples}"
        )
    if eos_id is None:
        eos_id = _end_token(dataset.config.tokenizer)
    if eos_id is None and dataset.config.pack_multiple > 1:
        raise ArgumentError(f"{path}: --eos-id must be given for a pack_multiple above 1 without a tokenizer")
    target = output
    if not output.name.endswith(SUFFIXES):
        target = output / f"{_NAMES[split]}_{dataset.config.sequence_length}{SUFFIXES[0]}"
    with show_progress("exporting") as progress:
        report = write_packed_parquet(dataset, target, eos_id=eos_id, num_samples=samples, progress=progress)
    _tell(target, report)


def _tell(target: Path, report: "PackedParquetReport") -> None:
    fill = report.num_places / report.num_packs / report.sequence_length
    click.echo(
        f"{printable(str(target))}: {number_of(report.num_packs, 'pack')} of "
        f"{number_of(report.num_segments, 'document')}, {fill:.2%} full, {target.stat().st_size:,} bytes"
    )
    if report.num_lost_labels:
        click.echo(
            f"trackbed: warning: Megatron-Bridge leaves {number_of(report.num_lost_labels, 'trained label')} out of "
            "the loss that follow an end token inside a document",
            err=True,
        )
    if report.num_moved_ends:
        click.echo(
            f"trackbed: warning: Megatron-Bridge counts a place more or fewer in "
            f"{number_of(report.num_moved_ends, 'document')} that do not end in one end token",
            err=True,
        )


def _end_token(tokenizer: Any) -> int | None:
    """Returns the id of the end token of a blend's tokenizer; None if it has none."""
    try:
        return int(tokenizer.eod)
    except (ArgumentError, AttributeError, NotImplementedError):
        return None
