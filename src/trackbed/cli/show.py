"""`trackbed show`: the contents of a sample of a blend."""

from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import click

from trackbed.cli.output import json_text, printable
from trackbed.cli.parse import idx_cache_option
from trackbed.errors import ArgumentError, FormatError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.loading import Provenance


@click.command(short_help="Show what a sample of a blend contains.")
@click.argument("path", metavar="BLEND.toml", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--sample", type=int, default=0, show_default=True, metavar="K",
    help="Position of the sample; a negative one counts from the end.",
)  # fmt: skip
@click.option(
    "--split", type=click.Choice(["train", "valid", "test"]), default="train", show_default=True,
    help="Part of the blend that the position counts in.",
)  # fmt: skip
@click.option("--cache", metavar="FOLDER", help="Folder of the indices, instead of the file's `cache`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@idx_cache_option
def show(path: str, *, sample: int, split: str, cache: str | None, as_json: bool, idx_cache: str | None) -> None:
    """Show the contents of a sample of a blend: its documents, and their text.

    {-Marked-} text is excluded from the loss. Missing indices are built.
    """
    from trackbed.blends import measure_blend, plan_blend, read_blend_file
    from trackbed.builder import BlendedMegatronDatasetBuilder
    from trackbed.loading import provenance

    blend = measure_blend(read_blend_file(path).with_idx_cache(idx_cache))
    plan_blend(blend).problems.stop()
    config = blend.config(cache=cache)
    built = BlendedMegatronDatasetBuilder(blend.dataset_class, blend.sizes, lambda: True, config).build()
    dataset = dict(zip(("train", "valid", "test"), built, strict=True))[split]
    if dataset is None or isinstance(dataset, list):
        found_instead = "several datasets (multiple_validation_sets)" if dataset else "none"
        raise ArgumentError(f"{path}: --split {split} must be one with one dataset, found {found_instead}")
    if not -len(dataset) <= sample < len(dataset):
        raise ArgumentError(
            f"{path}: --sample must be in [-{len(dataset)}, {len(dataset)}), the samples of {split}, found {sample}"
        )
    found = provenance(dataset, sample)
    texts = _texts(found, dataset[sample], config.tokenizer)
    if as_json:
        click.echo(_to_json(found, texts))
    else:
        _draw(found, texts, len(dataset), split)


def _texts(found: "Provenance", sample: dict[str, Any], tokenizer: Any) -> list[list[tuple[str, bool]]]:
    """Returns the text of each document, in runs; the flag of a run is True if it counts in the loss."""
    ids = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
    counts = [True, *(bool(weight) for weight in sample["loss_mask"])]  # the first token is no label
    borders = [0, *accumulate(origin.stop - origin.start for origin in found.origins)]
    documents = [list(zip(ids[start:stop], counts[start:stop], strict=True)) for start, stop in pairwise(borders)]
    return [
        [
            (_decode([token for token, _ in run], tokenizer), does_count)
            for does_count, run in groupby(document, key=lambda one: one[1])
        ]
        for document in documents
    ]


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


def _to_json(found: "Provenance", texts: list[list[tuple[str, bool]]]) -> str:
    from dataclasses import asdict

    fields = asdict(found)
    for origin, runs in zip(fields["origins"], texts, strict=True):
        origin["text"] = [{"text": text, "counts": does_count} for text, does_count in runs]
    return json_text(fields)


def _draw(provenance: "Provenance", texts: list[list[tuple[str, bool]]], num_samples: int, split: str) -> None:
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
    for origin, runs in zip(provenance.origins, texts, strict=True):
        where = f"{origin.prefix}, document {origin.document:,}, tokens [{origin.start:,}, {origin.stop:,})"
        console.print(Text(f"--- {where}", style="bold"))
        console.print(Text.assemble(*(_marked(text, does_count=does_count) for text, does_count in runs)))


def _marked(text: str, *, does_count: bool) -> tuple[str, str]:
    """Escapes control characters. Returns the text to show, and its style."""
    shown = printable(text, keep="\n")
    return (shown, "") if does_count else (f"{{-{shown}-}}", "dim")
