"""Reader of blend files, with all checks that need no data."""

import codecs
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trackbed.blends.blend_file import BlendFile, DatasetEntry, SizeEntry
from trackbed.blends.dataset_tables import read_datasets, read_stages
from trackbed.blends.sizes import SIZE_KEYS, read_sizes
from trackbed.blends.tokenizer import read_tokenizer
from trackbed.blends.toml_tables import (
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    WHOLE_POSITIVE,
    KeyPath,
    Problems,
    Rule,
    TableReader,
    find_key_lines,
    one_of,
)
from trackbed.datasets.config import ORDERS
from trackbed.errors import ArgumentError, BlendFileError
from trackbed.files.stores import is_address, redact
from trackbed.index.splits import Split, convert_split_vector_to_split_matrix, parse_and_normalize_split

VERSION: Final = 1
"""Supported version of the format."""

_MOST_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 256
_LONG_KEY: Final = re.compile(rf"(?<![\w-])(?:(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")
_SYNTAX_LINE: Final = re.compile(r" \(at line (\d+), column (\d+)\)$")
_NUMBERS: Final = re.compile(r"\s*[.0-9]+\s*(,\s*[.0-9]+\s*){0,2}")
_AT_END: Final = " (at end of document)"
_TWICE: Final = ("Cannot overwrite a value", "Cannot declare ('dataset',) twice")


def _is_split(value: object) -> bool:
    """True for a list of numbers. The configuration, like Megatron Core, accepts numbers among any words."""
    try:
        return isinstance(value, str) and bool(_NUMBERS.fullmatch(value) and parse_and_normalize_split(value))
    except ArgumentError:
        return False


_SPLIT: Final = Rule("up to three numbers that are not all 0, such as '98,1,1'", _is_split)
_SEED: Final = Rule("a whole number in [0, 2**32)", lambda value: WHOLE.holds(value) and value < 2**32)


def read_blend_file(path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None) -> BlendFile:
    """Reads the blend file at `path`.

    Args:
        path: path of the file.
        folder: folder to which paths in it are relative; by default that of the file.

    Raises:
        BlendFileError: the file is no TOML, or has invalid settings; lists all problems, each with its line.
        ArgumentError: `path` is an address.
        OSError: the file cannot be read.
    """
    if is_address(path):
        raise ArgumentError(f"a blend file must be a file on this host, found the address {redact(os.fspath(path))}")
    path = Path(path)
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    return read_blend_content(raw, path=path, folder=path.parent if folder is None else Path(folder))


def read_blend_content(raw: bytes, *, path: Path, folder: Path) -> BlendFile:
    """Reads the content of a blend file.

    Args:
        raw: the content.
        path: name of the file, for errors.
        folder: folder to which paths in it are relative.

    Raises:
        BlendFileError: it is no TOML, or has invalid settings; lists all problems, each with its line.
    """
    return _read(path, folder, *_parse(path, raw))


def read_blend_table(table: Mapping[str, Any], *, where: str) -> BlendFile:
    """Reads the content of a blend file from a mapping. Paths in it are relative to the working directory.

    Args:
        table: the keys of a blend file, as `tomllib` returns them, without `version`.
        where: takes the place of the file's name in errors.

    Raises:
        BlendFileError: invalid settings; lists all problems.
    """
    return _read(Path(where), Path(), {"version": VERSION, **table}, {})


def with_tokenizer(file: BlendFile, setting: Any) -> BlendFile:
    """Returns a blend file with another value of its key `tokenizer`; paths are relative to the working directory.

    Raises:
        BlendFileError: the value is invalid; lists all problems.
    """
    problems = Problems(file.path, {})
    entry = read_tokenizer(TableReader({"tokenizer": setting}, (), problems), Path())
    problems.stop()
    lines = {where: line for where, line in file.lines.items() if where[:1] != ("tokenizer",)}
    return replace(file, tokenizer=entry, lines=lines)


def _read(path: Path, folder: Path, table: Mapping[str, Any], lines: dict[KeyPath, int]) -> BlendFile:
    problems = Problems(path, lines)
    reader = TableReader(table, (), problems)
    reader.need("version", one_of([VERSION]), VERSION)
    problems.stop()  # another version has other keys
    fields = _fields(reader, folder)
    reader.refuse_unknown()
    problems.stop()
    return BlendFile(path=path, lines=lines, **fields)


def _parse(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Returns the values of a TOML file, and the line of each key."""
    if len(raw) > _MOST_BYTES:
        text = f"must have at most {_MOST_BYTES:,} bytes, found more: use globs or groups to name many pairs"
        raise BlendFileError([f"{path}:1: {text}"])
    if raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = "must be UTF-8 without a byte order mark, found one: save it without (in PowerShell, utf8NoBOM)"
        raise BlendFileError([f"{path}:1: {text}"])
    try:
        text = raw.decode()
        _check_key_lengths(path, text)
        return tomllib.loads(text), find_key_lines(text)
    except UnicodeDecodeError as error:
        raise BlendFileError([f"{path}:1: must be UTF-8, found byte {error.object[error.start]:#x}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise BlendFileError([_syntax_problem(path, text, str(error))]) from error
    except ValueError as error:  # a number with more digits than Python parses
        raise BlendFileError([f"{path}:1: must be TOML with readable numbers: {error}"]) from error
    except RecursionError as error:
        raise BlendFileError(
            [f"{path}:1: must be TOML with little nesting, found arrays or tables nested too deeply"]
        ) from error


def _check_key_lengths(path: Path, text: str) -> None:
    """Refuses keys of hundreds of parts, as parsing one takes quadratic time."""
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > 2 * _MOST_PARTS and _LONG_KEY.search(line):
            raise BlendFileError([f"{path}:{number}: must have keys of fewer than {_MOST_PARTS} parts, found more"])


def _syntax_problem(path: Path, text: str, message: str) -> str:
    match = _SYNTAX_LINE.search(message)
    line = int(match[1]) if match else text.count("\n") + 1
    said = message[: match.start()] + f", column {match[2]}" if match else message.removesuffix(_AT_END)
    hint = (
        "; a table has each key once: every dataset begins with a line [[dataset]]"
        if message.startswith(_TWICE)
        else ""
    )
    return f"{path}:{line}: must be TOML: {said}{hint}"


def _fields(reader: TableReader, folder: Path) -> dict[str, Any]:
    order = reader.take("order", one_of(ORDERS), ORDERS[0])
    length = reader.need("sequence_length", WHOLE_POSITIVE, 1)
    split: str | None = reader.take("split", _SPLIT)
    cache = reader.take("cache", TEXT)
    options = read_options(reader.table("options"), folder)
    size = reader.table("size")
    sizes, batch = read_sizes(size, sequence_length=length)
    datasets = read_datasets(reader, folder, split=split, order=order)
    if split is not None or all(entry.splits for entry in datasets):  # else it is unknown what needs a size
        _check_sizes(size, sizes, datasets, split, options)
    return {
        "seed": reader.take("seed", _SEED, 1234),
        "sequence_length": length,
        "order": order,
        "split": split,
        "cache": None if cache is None else str(folder / cache),
        "tokenizer": read_tokenizer(reader, folder),
        "sizes": sizes,
        "datasets": datasets,
        "stages": read_stages(reader, datasets, order=order, sequence_length=length, global_batch_size=batch),
        "options": options,
    }


def _check_sizes(
    table: TableReader,
    sizes: SizeEntry,
    datasets: tuple[DatasetEntry, ...],
    split: str | None,
    options: dict[str, Any],
) -> None:
    """Checks that sizes are given where weights need them, and omitted where they follow from epochs."""
    bounds = None if split is None else convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for size_split in Split:
        if bounds is not None and bounds[size_split.value] is None:
            continue
        measures = {entry.measure for entry in datasets if entry.splits is None or size_split in entry.splits}
        follows = size_split is Split.train and measures == {"epochs"}
        is_full = size_split is Split.valid and options.get("full_validation")
        if follows and sizes.train is not None:
            table.refuse("", "must not give the size of train if its datasets give their epochs, found both")
        if measures - {None} and not follows and not is_full and not table.given(*SIZE_KEYS[size_split]):
            ways = ", ".join(SIZE_KEYS[size_split])
            table.refuse(
                "", f"must give the size of {size_split.name}, whose datasets have weights or epochs: one of {ways}"
            )


logger = logging.getLogger(__name__)

OPTIONS: Final[Mapping[str, Rule]] = {
    "add_extra_token_to_sequence": FLAG,
    "allow_ambiguous_pad_tokens": FLAG,
    "blend_when_exhausted": one_of(["raise", "reweight"]),
    "context_parallel_size": WHOLE_POSITIVE,
    "create_attention_mask": FLAG,
    "create_cu_seqlens": FLAG,
    "data_parallel_size": WHOLE_POSITIVE,
    "defer_npy_index_mmap": FLAG,
    "drop_last_partial_validation_sequence": FLAG,
    "eod_mask_loss": FLAG,
    "fast_cache_load": FLAG,
    "full_validation": FLAG,
    "inter_document_masking": FLAG,
    "mask_borders": FLAG,
    "mid_level_dataset_surplus": NUMBER,
    "mmap_bin_files": FLAG,
    "multiple_validation_sets": FLAG,
    "num_dataset_builder_threads": WHOLE_POSITIVE,
    "object_storage_cache_path": TEXT,
    "pack_long": one_of(["split", "cut", "drop"]),
    "pack_most_documents": WHOLE_POSITIVE,
    "pack_multiple": WHOLE_POSITIVE,
    "pack_window": WHOLE_POSITIVE,
    "renormalize_blend_weights": FLAG,
    "reset_attention_mask": FLAG,
    "reset_position_ids": FLAG,
    "sequence_parallel_size": WHOLE,
    "shuffle_block": WHOLE_POSITIVE,
    "shuffle_window": WHOLE_POSITIVE,
}
_IDX_CACHE: Final = "object_storage_cache_path"
_REQUIRED: Final = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")
"""Fields without a default in Megatron Core; False by default in a blend file."""
_MASK: Final = "create_attention_mask"
"""True by default in Megatron Core; False in a blend file, as attention kernels make causal masks themselves."""


def read_options(table: TableReader, folder: Path) -> dict[str, Any]:
    """Reads the given options, and adds those that a configuration requires.

    Args:
        table: the table.
        folder: folder that paths are relative to.
    """
    given = {name: table.take(name, rule) for name, rule in OPTIONS.items()}
    table.refuse_unknown()
    if given[_IDX_CACHE] is not None:
        given[_IDX_CACHE] = str(folder / given[_IDX_CACHE])
    if given["reset_attention_mask"] and not given[_MASK]:
        logger.warning("options.reset_attention_mask has no effect without create_attention_mask = true")
    return {
        **dict.fromkeys((*_REQUIRED, _MASK), False),
        **{name: value for name, value in given.items() if value is not None},
    }
