"""`trackbed preprocess`: raw text to indexed files."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from trackbed.cli.parse import Input, Size, format_option, json_keys_option, record_limit_option
from trackbed.cli.preprocess_report import report_as_json, show_report
from trackbed.cli.progress import KeptWork

if TYPE_CHECKING:
    from trackbed.preprocess import ChatConfig, ImagesConfig
    from trackbed.preprocess.chat.encode import TrainOn
    from trackbed.preprocess.config import EngineName, FormatName, Level
    from trackbed.preprocess.engines import FailedAttempt


_NO_END: Final = "trackbed: documents end without an end-of-document token; give --append-eod for GPT training"


@click.command(
    epilog="\b\nExample, which writes web_text_document.bin and .idx:\n"
    "  trackbed preprocess web.jsonl --tokenizer t.json --output web --append-eod"
)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=Input())
@click.option(
    "--tokenizer",
    required=True,
    metavar="TOKENIZER",
    help="Hugging Face .json or folder, WordPiece vocab.txt, SentencePiece .model, tiktoken:NAME, bytes, or null:N for "
    "texts of numbers.",
)
@click.option(
    "--output",
    "-o",
    required=True,
    metavar="PREFIX",
    help="Writes PREFIX_KEY_document.bin and .idx; with --split-sentences PREFIX_KEY_sentence, with --images PREFIX.",
)
@json_keys_option("Keys of the texts in a JSON record; one pair of files per key.")
@click.option(
    "--drop-record",
    is_flag=True,
    help="With several keys, leave a record out of all pairs if one of its texts has no tokens; else such a text is "
    "one sequence without text.",
)
@click.option(
    "--chat",
    is_flag=True,
    help="Read conversations: messages, conversations, prompt and completion, input_ids, or text. Writes "
    "PREFIX_chat_document.bin, .idx and .mask, the tokens that are trained on.",
)
@click.option(
    "--chat-template",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Jinja file that writes messages as text; by default that in the folder of the tokenizer.",
)
@click.option(
    "--train-on",
    type=click.Choice(["marks", "all"]),
    help="Train on what the template has in {% generation %}, the default, or on all of it.",
)
@click.option("--turn-start", metavar="TEXT", help="For a template without marks: text before what the assistant says.")
@click.option("--turn-end", metavar="TEXT", help="Text at its end, which is trained on too.")
@click.option("--chat-date", metavar="YYYY-MM-DD", help="Date for templates that ask for today's.")
@click.option("--chat-template-kwargs", metavar="JSON", help="Variables of the template, such as a JSON object.")
@click.option("--append-eod", is_flag=True, help="End each document with the end-of-document token.")
@click.option("--split-sentences", is_flag=True, help="Write each sentence as a sequence, to PREFIX_KEY_sentence.")
@click.option(
    "--splitter",
    metavar="NAME",
    help="sentencex (the default), sentencex:LANGUAGE, or punkt:FOLDER with a Punkt model of nltk.",
)
@click.option(
    "--images",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Write the image of each record behind its text, to PREFIX.bin and .idx; needs --pad-length.",
)
@click.option("--image-key", metavar="KEY", help="Key of the path of the image below FOLDER; by default image.")
@click.option(
    "--pad-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --append-eod, cut texts or fill them with the end token to N tokens.",
)
@click.option(
    "--eod-token",
    metavar="TOKEN",
    help="End-of-document token; needed if the tokenizer has none of the usual ones, <|endoftext|>, </s> and the like.",
)
@click.option("--lower-case", is_flag=True, help="Lower-case texts, for a WordPiece vocabulary of lower-case text.")
@click.option("--special-tokens", is_flag=True, help="Encode special tokens written out in a text as such.")
@click.option("--skip-bad", is_flag=True, help="Count and skip records that cannot be used.")
@record_limit_option
@format_option
@click.option("--allow-empty", is_flag=True, help="Write a pair even if it has no document.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes; by default one per core that the process, or the quota of its container, may use.",
)
@click.option(
    "--shard-bytes",
    type=Size(),
    metavar="SIZE",
    help="Write shards of SIZE bytes of input each, such as 4GB, and PREFIX.toml, which lists them.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Make the shards in processes of this host, or on the cluster of RAY_ADDRESS; ray needs "
    "pip install '.[ray]', and inputs, tokenizer and PREFIX that every host has at the same path or address.",
)
@click.option("--keep-sources", is_flag=True, help="Write PREFIX.src beside each pair: where each document comes from.")
@click.option("--overwrite", is_flag=True, help="Replace shards that were made of other inputs or options.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the names of all files read and left out.")
def preprocess(
    inputs: tuple[Path | str, ...],
    *,
    tokenizer: str,
    output: str,
    json_keys: tuple[str, ...],
    drop_record: bool,
    chat: bool,
    chat_template: Path | None,
    train_on: "TrainOn | None",
    turn_start: str | None,
    turn_end: str | None,
    chat_date: str | None,
    chat_template_kwargs: str | None,
    append_eod: bool,
    split_sentences: bool,
    splitter: str | None,
    images: Path | None,
    image_key: str | None,
    pad_length: int | None,
    eod_token: str | None,
    lower_case: bool,
    special_tokens: bool,
    skip_bad: bool,
    max_record_bytes: int,
    input_format: "FormatName | None",
    allow_empty: bool,
    workers: int | None,
    shard_bytes: int | None,
    engine: "EngineName",
    overwrite: bool,
    keep_sources: bool,
    as_json: bool,
) -> None:
    """Turn texts into indexed token files.

    INPUT is a file or a folder. A .jsonl or .json file holds one JSON record per line, a .txt or .md file is one
    document, and each row of a .parquet file is one; .gz and .zst files are decompressed. Files with other suffixes
    need --format; without it, those in a folder are left out. So are names in a folder that begin with . or _, and a
    file is read once, whatever links lead to it. The report names what was left out. Texts are taken as they are,
    unless an option says otherwise.

    INPUT may also be an address such as s3://bucket/key, or s3://bucket/folder for all objects below it; with
    --shard-bytes, so may PREFIX. Credentials come from the environment, such as AWS_ACCESS_KEY_ID.

    With --chat, a .jsonl record or a row is a conversation, which a chat template writes as text. A conversation of
    which no token is trained is counted and left out.

    An existing pair is replaced once the new one is complete. After a kill or Ctrl-C, the same command goes on.
    """
    from trackbed.cli.progress import show_progress
    from trackbed.preprocess import (
        SENTENCEX,
        PreprocessConfig,
        available_cores,
        maps_special_tokens,
        open_fastest_tokenizer,
        open_splitter,
    )
    from trackbed.preprocess import preprocess as run

    if splitter is not None and not split_sentences:
        raise click.UsageError("--splitter needs --split-sentences")
    if images is not None and split_sentences:
        raise click.UsageError("--images and --split-sentences exclude each other")
    if drop_record and len(json_keys) < 2:
        raise click.UsageError("--drop-record needs several --json-keys")
    _check_shards(shard_bytes, engine, images, overwrite=overwrite)
    given = {
        "--chat-template": chat_template,
        "--train-on": train_on,
        "--turn-start": turn_start,
        "--turn-end": turn_end,
        "--chat-date": chat_date,
        "--chat-template-kwargs": chat_template_kwargs,
    }
    conversations = _chat(given, is_chat=chat)
    if chat and split_sentences:
        raise click.UsageError("--chat and --split-sentences exclude each other")
    config = PreprocessConfig(
        inputs=inputs,
        output=output,
        json_keys=json_keys,
        drop_record=drop_record,
        chat=conversations,
        append_eod=append_eod,
        images=_images(images, image_key, pad_length),
        skip_bad=skip_bad,
        input_format=input_format,
        allow_empty=allow_empty,
        max_record_bytes=max_record_bytes,
        workers=workers or available_cores(),
        shard_bytes=shard_bytes,
        engine=engine,
        overwrite=overwrite,
        keep_sources=keep_sources,
    )
    sentences = open_splitter(splitter or SENTENCEX) if split_sentences else None
    opened = open_fastest_tokenizer(
        tokenizer,
        lower_case=lower_case,
        eod_token=eod_token,
        special_tokens=special_tokens or (chat and maps_special_tokens(tokenizer)),
    )
    if shard_bytes is None:
        _tell_what_is_replaced(output, config.json_keys, split_sentences=split_sentences, is_one=images is not None)
    start = time.monotonic()
    kept = KeptWork()
    with show_progress("tokenising") as progress, kept.told_at_an_interrupt():

        def show_failure(failed: "FailedAttempt") -> None:
            progress.count("failed attempts")
            click.echo(f"trackbed: {failed.task}: attempt {failed.attempt} failed: {failed.how}", err=True)

        report = run(config, opened, splitter=sentences, progress=progress, on_failure=show_failure, on_save=kept)
    seconds = time.monotonic() - start
    if as_json:
        click.echo(report_as_json(report, seconds))
    else:
        show_report(report, seconds, split_sentences=split_sentences)
    if not (append_eod or split_sentences or chat or images is not None):
        click.echo(_NO_END, err=True)


def _tell_what_is_replaced(output: str, keys: Sequence[str], *, split_sentences: bool, is_one: bool) -> None:
    """Prints a line for each pair that is there already."""
    from trackbed.preprocess import output_prefix

    level: Level = "sentence" if split_sentences else "document"
    for prefix in [output] if is_one else [output_prefix(output, key, level=level) for key in keys]:
        if Path(f"{prefix}.idx").exists():
            click.echo(f"trackbed: {prefix}.bin and .idx exist, and are replaced once the new ones are whole", err=True)


def _chat(given: Mapping[str, Any], *, is_chat: bool) -> "ChatConfig | None":
    """Combines the options of conversations."""
    from trackbed.preprocess import ChatConfig

    if not is_chat:
        named = next((name for name, value in given.items() if value is not None), None)
        if named is not None:
            raise click.UsageError(f"{named} needs --chat")
        return None
    variables: Any = {}
    if given["--chat-template-kwargs"] is not None:
        try:
            variables = json.loads(given["--chat-template-kwargs"])
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"--chat-template-kwargs must be a JSON object: {error}") from None
    return ChatConfig(
        template=given["--chat-template"],
        train_on=given["--train-on"] or "marks",
        turn_start=given["--turn-start"],
        turn_end=given["--turn-end"],
        date=given["--chat-date"],
        variables=variables,
    )


def _check_shards(shard_bytes: int | None, engine: str, images: Path | None, *, overwrite: bool) -> None:
    """Checks the options of shards."""
    if shard_bytes is not None and images is not None:
        raise click.UsageError("--shard-bytes and --images exclude each other")
    for name, is_given in (("--engine ray", engine == "ray"), ("--overwrite", overwrite)):
        if is_given and shard_bytes is None:
            raise click.UsageError(f"{name} needs --shard-bytes")


def _images(folder: Path | None, key: str | None, pad_length: int | None) -> "ImagesConfig | None":
    """Combines the options of images."""
    from trackbed.preprocess import ImagesConfig

    if folder is None:
        for name, value in (("--image-key", key), ("--pad-length", pad_length)):
            if value is not None:
                raise click.UsageError(f"{name} needs --images")
        return None
    if pad_length is None:
        raise click.UsageError("--images needs --pad-length")
    given = {} if key is None else {"key": key}
    return ImagesConfig(folder=folder, pad_length=pad_length, **given)
