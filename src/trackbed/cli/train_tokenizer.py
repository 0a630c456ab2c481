"""`trackbed train-tokenizer`: training of a byte-level BPE."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trackbed.cli.parse import format_option, json_keys_option, record_limit_option
from trackbed.cli.preprocess_report import files_line
from trackbed.daemon_threads import run_in_thread

if TYPE_CHECKING:
    from trackbed.preprocess.config import FormatName


@click.command(epilog="\b\nExample:\n  trackbed train-tokenizer web.jsonl --output t.json --vocab-size 32000")
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="File to write the tokenizer to.",
)
@click.option(
    "--vocab-size", type=int, default=32_768, show_default=True, metavar="N", help="Maximum number of tokens."
)
@click.option(
    "--special-token",
    "special_tokens",
    multiple=True,
    default=["<|endoftext|>"],
    show_default=True,
    metavar="TOKEN",
    help="Special token; may be given several times.",
)
@json_keys_option("Keys of the texts in a JSON record.")
@click.option("--skip-bad", is_flag=True, help="Skip records that cannot be used.")
@record_limit_option
@format_option
def train_tokenizer(
    inputs: tuple[Path, ...],
    *,
    output: Path,
    vocab_size: int,
    special_tokens: tuple[str, ...],
    json_keys: tuple[str, ...],
    skip_bad: bool,
    max_record_bytes: int,
    input_format: "FormatName | None",
) -> None:
    """Train a byte-level BPE on texts.

    INPUT is as for `trackbed preprocess`. Hugging Face `tokenizers` and `trackbed preprocess --tokenizer` read the
    output.
    """
    from trackbed.cli.progress import show_progress
    from trackbed.preprocess import TrainingConfig
    from trackbed.preprocess import train_tokenizer as run

    config = TrainingConfig(
        inputs=inputs,
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        json_keys=json_keys,
        skip_bad=skip_bad,
        input_format=input_format,
        max_record_bytes=max_record_bytes,
    )
    with show_progress("reading") as progress:
        if output.exists():
            click.echo(f"trackbed: {output} exists, and is replaced once the new one is whole", err=True)
        trained = run_in_thread(lambda: run(config, output, progress=progress))
    click.echo(
        f"vocabulary {trained.vocab_size:,}, records {trained.records:,}, bad {trained.bad:,}\n"
        f"{files_line(trained.formats, trained.left_out)}\n{trained.path}"
    )
