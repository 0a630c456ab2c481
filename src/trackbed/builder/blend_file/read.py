"""Reading a blend file: what it says is checked as far as it can be without looking at the data."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from trackbed.builder.blend_file.datasets import read_datasets
from trackbed.builder.blend_file.description import BlendFile, DatasetEntry, SizeEntry
from trackbed.builder.blend_file.options import read_options
from trackbed.builder.blend_file.positions import KeyPath, find_keys
from trackbed.builder.blend_file.sizes import WAYS, read_sizes
from trackbed.builder.blend_file.stages import read_stages
from trackbed.builder.blend_file.tables import (
    TEXT,
    WHOLE,
    WHOLE_POSITIVE,
    Problems,
    Rule,
    TableReader,
    one_of,
)
from trackbed.builder.blend_file.tokenizer import read_tokenizer
from trackbed.datasets.config import ORDERS
from trackbed.errors import ArgumentError, BlendFileError
from trackbed.index.splits import Split, convert_split_vector_to_split_matrix, parse_and_normalize_split

__all__ = ["VERSION", "read_blend_file"]

VERSION: Final = 1
"""The version of the format that is read."""

_MOST_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 256
_LONG_KEY: Final = re.compile(rf"(?<![\w-])(?:(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")
_SYNTAX_LINE: Final = re.compile(r" \(at line (\d+), column (\d+)\)$")
_NUMBERS: Final = re.compile(r"\s*[.0-9]+\s*(,\s*[.0-9]+\s*){0,2}")
_AT_END: Final = " (at end of document)"


def _is_split(value: object) -> bool:
    """Whether it is a list of numbers. The configuration, as Megatron Core, looks for numbers among any words."""
    try:
        return isinstance(value, str) and bool(_NUMBERS.fullmatch(value) and parse_and_normalize_split(value))
    except ArgumentError:
        return False


_SPLIT: Final = Rule("up to three numbers that are not all 0, such as '98,1,1'", _is_split)
_SEED: Final = Rule("a whole number in [0, 2**32)", lambda value: WHOLE.holds(value) and value < 2**32)


def read_blend_file(path: str | os.PathLike[str]) -> BlendFile:
    """What the blend file at `path` says. Paths in it are relative to its folder.

    Raises:
        BlendFileError: the file is no TOML, or says what cannot be meant; all that is wrong, each with its line.
        OSError: the file cannot be read.
    """
    path = Path(path)
    table, lines = _parse(path)
    problems = Problems(path, lines)
    reader = TableReader(table, (), problems)
    reader.need("version", one_of([VERSION]), VERSION)
    problems.stop()  # the keys of another version mean nothing here
    fields = _fields(reader, path.parent)
    reader.done()
    problems.stop()
    return BlendFile(path=path, lines=lines, **fields)


def _parse(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Returns the values of a TOML file, and the line of each key."""
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        text = f"must have at most {_MOST_BYTES:,} bytes, found more: a glob or a group names many pairs at once"
        raise BlendFileError([f"{path}:1: {text}"])
    try:
        text = raw.decode()
        _check_key_lengths(path, text)
        return tomllib.loads(text), find_keys(text)
    except UnicodeDecodeError as error:
        raise BlendFileError([f"{path}:1: must be UTF-8, found byte {error.object[error.start]:#x}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise BlendFileError([_syntax_problem(path, text, str(error))]) from error
    except ValueError as error:  # a number of more digits than Python reads
        raise BlendFileError([f"{path}:1: must be TOML whose numbers can be read: {error}"]) from error
    except RecursionError as error:
        raise BlendFileError([f"{path}:1: must be TOML of few levels, found arrays or tables too deep"]) from error


def _check_key_lengths(path: Path, text: str) -> None:
    """Refuses keys of hundreds of parts: the time that it takes to read one grows with the square of them."""
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > 2 * _MOST_PARTS and _LONG_KEY.search(line):
            raise BlendFileError([f"{path}:{number}: must have keys of fewer than {_MOST_PARTS} parts, found more"])


def _syntax_problem(path: Path, text: str, message: str) -> str:
    match = _SYNTAX_LINE.search(message)
    line = int(match[1]) if match else text.count("\n") + 1
    said = message[: match.start()] + f", column {match[2]}" if match else message.removesuffix(_AT_END)
    return f"{path}:{line}: must be TOML: {said}"


def _fields(reader: TableReader, folder: Path) -> dict[str, Any]:
    order = reader.take("order", one_of(ORDERS), ORDERS[0])
    length = reader.need("sequence_length", WHOLE_POSITIVE, 1)
    split: str | None = reader.take("split", _SPLIT)
    cache = reader.take("cache", TEXT)
    options = read_options(reader.table("options"))
    size = reader.table("size")
    sizes, batch = read_sizes(size, sequence_length=length)
    datasets = read_datasets(reader, folder, split=split)
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
    """Sizes that weights need, and sizes that follow from epochs."""
    bounds = None if split is None else convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for one in Split:
        if bounds is not None and bounds[one.value] is None:
            continue
        measures = {entry.measure for entry in datasets if entry.splits is None or one in entry.splits}
        follows = one is Split.train and measures == {"epochs"}
        is_full = one is Split.valid and options.get("full_validation")
        if follows and sizes.train is not None:
            table.refuse("", "must not say the size of train where its datasets say their epochs, found both")
        if measures - {None} and not follows and not is_full and not table.given(*WAYS[one]):
            ways = ", ".join(WAYS[one])
            table.refuse("", f"must say the size of {one.name}, whose datasets have weights: by {ways}")
