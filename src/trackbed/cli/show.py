"""`trackbed show`: the contents of a sample of a blend."""

from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trackbed.cli.output import json_text, mark_run, printable
from trackbed.cli.parse import idx_cache_option
from trackbed.errors import ArgumentError, FormatError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.cli.source_places import SourcePlace
    from trackbed.loading import Provenance


@click.command(short_help="Show what a sample of a blend contains.")
@click.argument("path", metavar="[BLEND.toml]", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--sample", type=int, metavar="K", help="Position of the sample, by default 0; a negative one counts from the end.",
)  # fmt: skip
@click.option(
    "--run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN",
    help="Folder of a run: show all samples of a --step of it, from the blend file that it had then.",
)  # fmt: skip
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="With --run: number of the step.")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="With --run: only what this rank has read.")
@click.option(
    "--split", type=click.Choice(["train", "valid", "test"]), default="train", show_default=True,
    help="Part of the blend that the position counts in.",
)  # fmt: skip
@click.option("--cache", metavar="FOLDER", help="Folder of the indices, instead of the file's `cache`.")
@click.option("--lines", is_flag=True, help="Count the line of each source, which reads its file up to there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@idx_cache_option
def show(
    path: str | None,
    *,
    sample: int | None,
    run: Path | None,
    step: int | None,
    rank: int | None,
    split: str,
    cache: str | None,
    lines: bool,
    as_json: bool,
    idx_cache: str | None,
) -> None:
    """Show the contents of a sample of a blend, or of a step of a run: the documents, and their text.

    {-Marked-} text is excluded from the loss. Missing indices are built. Of pairs that were made with --keep-sources,
    each document has its input file and place.
    """
    if run is not None and (path is not None or sample is not None or split != "train"):
        raise click.UsageError("--run excludes BLEND.toml, --sample and --split")
    if (run is None) != (step is None) or (rank is not None and run is None):
        raise click.UsageError("--run and --step need each other, and --rank needs both")
    if run is None and path is None:
        raise click.UsageError("Missing argument 'BLEND.toml'.")
    from trackbed.blends import read_blend_file
    from trackbed.cli.blend_split import open_split
    from trackbed.cli.show_step import find_step
    from trackbed.cli.source_places import Sources
    from trackbed.loading import provenance

    if run is not None and step is not None:
        file, positions = find_step(run, step, rank, idx_cache)
    else:
        file, positions = read_blend_file(str(path)).with_idx_cache(idx_cache), [sample or 0]
    dataset = open_split(file, split, cache)
    for position in positions:
        if not -len(dataset) <= position < len(dataset):
            place = f"[-{len(dataset)}, {len(dataset)}), the samples of {split}"
            raise ArgumentError(f"{file.path}: --sample must be in {place}, found {position}")
    every, sources = [], Sources(counts_lines=lines)
    for position in positions:
        found = provenance(dataset, position)
        texts = _texts(found, dataset[position], dataset.config.tokenizer)
        places = [sources.of(origin.prefix, origin.document) for origin in found.origins]
        if not as_json:
            _draw(found, texts, places, len(dataset), split)
        every.append(_fields(found, texts, places))
    if as_json:
        click.echo(json_text({"step": step, "samples": every} if run is not None else every[0]))


def _texts(found: "Provenance", sample: dict[str, Any], tokenizer: Any) -> list[list[tuple[str, bool]]]:
    """Returns the text of each document, in runs; the flag of a run is True if it counts in the loss."""
    from trackbed.preprocess.inspection import texts_of_runs

    every = []
    for document in _packed(sample) if "cu_seqlens_padded" in sample else _stretch(found, sample):
        runs = [(does_count, [token for token, _ in run]) for does_count, run in groupby(document, lambda one: one[1])]
        texts = texts_of_runs([run for _, run in runs], lambda ids: _decode(ids, tokenizer))
        every.append([(text, does_count) for text, (does_count, _) in zip(texts, runs, strict=True)])
    return every


def _stretch(found: "Provenance", sample: dict[str, Any]) -> list[list[tuple[int, bool]]]:
    """Returns the tokens of each document in a sample, and whether each counts in the loss."""
    ids = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
    counts = [True, *(bool(weight) for weight in sample["loss_mask"])]  # the first token is no label
    borders = [0, *accumulate(origin.stop - origin.start for origin in found.origins)]
    return [list(zip(ids[start:stop], counts[start:stop], strict=True)) for start, stop in pairwise(borders)]


def _packed(sample: dict[str, Any]) -> list[list[tuple[int, bool]]]:
    """Returns the tokens of each document in a pack, and whether each counts in the loss."""
    documents = []
    for start, places in zip(sample["cu_seqlens_padded"].tolist(), sample["cu_seqlens"].diff().tolist(), strict=False):
        own = slice(start, start + places)
        ids = [int(sample["tokens"][start]), *sample["labels"][own].tolist()] if places else []
        documents.append(list(zip(ids, [True, *sample["loss_mask"][own].bool().tolist()], strict=False)))
    return [document for document in documents if document]


def _decode(ids: list[int], tokenizer: Any) -> str:
    """Decodes tokens; returns their ids as text if the blend file has no tokenizer."""
    import numpy as np

    from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors

    if not hasattr(tokenizer, "detokenize"):
        return " ".join(map(str, ids))
    try:
        with panics_as_errors():
            return str(tokenizer.detokenize(np.array(ids, dtype=np.int64)))
    except RuntimeError as error:
        raise FormatError(f"the tokenizer must decode the tokens {ids[:8]} ..., found an error: {error}") from error


def _fields(
    found: "Provenance", texts: list[list[tuple[str, bool]]], places: list["SourcePlace | None"]
) -> dict[str, Any]:
    from dataclasses import asdict

    fields = asdict(found)
    for origin, runs, place in zip(fields["origins"], texts, places, strict=True):
        origin["text"] = [{"text": text, "counts": does_count} for text, does_count in runs]
        if place is not None:
            origin["source"] = {name: value for name, value in asdict(place).items() if value is not None}
    return fields


def _draw(
    provenance: "Provenance",
    texts: list[list[tuple[str, bool]]],
    places: list["SourcePlace | None"],
    num_samples: int,
    split: str,
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    which = "" if provenance.dataset is None else f"dataset {provenance.dataset}, "
    documents = number_of(len(provenance.origins), "document")
    tokens = sum(origin.stop - origin.start for origin in provenance.origins)
    console.print(
        f"sample {provenance.position:,} of {num_samples:,} of {split}: {which}{provenance.prefix}", markup=False
    )
    console.print(f"its sample {provenance.sample:,}: {number_of(tokens, 'token')} of {documents}", markup=False)
    for origin, runs, place in zip(provenance.origins, texts, places, strict=True):
        where = f"{origin.prefix}, document {origin.document:,}, tokens [{origin.start:,}, {origin.stop:,})"
        console.print(Text(f"--- {where}", style="bold"))
        if place is not None:
            console.print(Text(f"    from {printable(str(place))}", style="dim"))
        console.print(Text.assemble(*(_marked(text, does_count=does_count) for text, does_count in runs)))


def _marked(text: str, *, does_count: bool) -> tuple[str, str]:
    """Escapes control characters. Returns the text to show, and its style."""
    shown = printable(text, keep="\n")
    return mark_run(shown, counts=does_count), "" if does_count else "dim"
