"""`trackbed show`: what a sample of a blend holds."""

import json
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import click

from trackbed.errors import ArgumentError

if TYPE_CHECKING:
    from trackbed.loading import Provenance

__all__ = ["show"]


@click.command()
@click.argument("path", metavar="BLEND.toml", type=click.Path(exists=True, dir_okay=False))
@click.option("--sample", type=int, required=True, metavar="K", help="Position of the sample; below 0 from the end.")
@click.option("--split", type=click.Choice(["train", "valid", "test"]), default="train", show_default=True)
@click.option("--cache", metavar="FOLDER", help="Where the indices are, in place of the file's `cache`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def show(path: str, *, sample: int, split: str, cache: str | None, as_json: bool) -> None:
    """Show what a sample of a blend holds: its documents, and their text.

    {-Marked-} is what no loss is computed for. Indices that are not there yet are built.
    """
    from trackbed.builder import BlendedMegatronDatasetBuilder, measure_blend, plan_blend, read_blend_file
    from trackbed.loading import provenance

    blend = measure_blend(read_blend_file(path))
    plan_blend(blend).problems.stop()
    config = blend.config(cache=cache)
    built = BlendedMegatronDatasetBuilder(blend.dataset_class, blend.sizes, lambda: True, config).build()
    dataset = dict(zip(("train", "valid", "test"), built, strict=True))[split]
    if dataset is None or isinstance(dataset, list) or not -len(dataset) <= sample < len(dataset):
        size = 0 if dataset is None or isinstance(dataset, list) else len(dataset)
        msg = f"{path}: --sample must be in [-{size}, {size}), the samples of {split}, found {sample}"
        raise ArgumentError(msg)
    found = provenance(dataset, sample)
    texts = _texts(found, dataset[sample], config.tokenizer)
    if as_json:
        click.echo(_to_json(found, texts))
    else:
        _draw(found, texts, len(dataset), split)


def _texts(found: "Provenance", sample: dict[str, Any], tokenizer: Any) -> list[list[tuple[str, bool]]]:
    """Of each document its text, in runs, and whether a loss is computed for a run."""
    ids = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
    counts = [True, *(bool(weight) for weight in sample["loss_mask"])]  # nobody predicts the first token
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
    """The text of some tokens; their numbers, where the blend file has no tokenizer."""
    import numpy as np

    if not hasattr(tokenizer, "detokenize"):
        return " ".join(map(str, ids))
    return str(tokenizer.detokenize(np.array(ids, dtype=np.int64)))


def _to_json(found: "Provenance", texts: list[list[tuple[str, bool]]]) -> str:
    from dataclasses import asdict

    fields = asdict(found)
    for origin, runs in zip(fields["origins"], texts, strict=True):
        origin["text"] = [{"text": text, "counts": does_count} for text, does_count in runs]
    return json.dumps(fields, ensure_ascii=False, indent=1)


def _draw(found: "Provenance", texts: list[list[tuple[str, bool]]], num_samples: int, split: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    which = "" if found.dataset is None else f"dataset {found.dataset}, "
    tokens = sum(origin.stop - origin.start for origin in found.origins)
    console.print(f"sample {found.position:,} of {num_samples:,} of {split}: {which}{found.prefix}", markup=False)
    console.print(f"its sample {found.sample:,}: {tokens:,} tokens of {len(found.origins)} documents", markup=False)
    for origin, runs in zip(found.origins, texts, strict=True):
        where = f"{origin.prefix}, document {origin.document:,}, tokens [{origin.start:,}, {origin.stop:,})"
        console.print(Text(f"--- {where}", style="bold"))
        console.print(Text.assemble(*(_marked(text, does_count=does_count) for text, does_count in runs)))


def _marked(text: str, *, does_count: bool) -> tuple[str, str]:
    """A text with its control characters written out, and how it looks."""
    shown = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
    return (shown, "") if does_count else (f"{{-{shown}-}}", "dim")
