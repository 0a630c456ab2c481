"""Tokenizer of a blend file: a file, or the properties that datasets need."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from trackbed.blends.blend_file import TokenizerEntry
from trackbed.blends.members import Member
from trackbed.blends.toml_tables import FLAG, TABLE, TEXT, WHOLE, WHOLE_POSITIVE, Problems, Rule, TableReader
from trackbed.datasets.tokenizers.base import MegatronIdentity
from trackbed.datasets.tokenizers.kinds import is_path, is_wordpiece, open_tokenizer
from trackbed.files.stores import is_address
from trackbed.kernels.integers import is_integer
from trackbed.tokens import IndexedDataset

_FILE_OR_TABLE: Final = Rule("the name of a file, or a table", lambda value: TEXT.holds(value) or TABLE.holds(value))


@dataclass(frozen=True, slots=True)
class StatedTokenizer:
    """Properties of a tokenizer that is not available here, sufficient to build indices."""

    eod: int
    """Id of the end-of-document token."""
    vocab_size: int
    """Number of ids, which are in `[0, vocab_size)`."""
    pad: int | None = None
    """Id that pads short samples, or None."""
    megatron_identity: MegatronIdentity | None = None
    """Identity in a Megatron job that shares the cache."""

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Identifiers that the names of indices depend on."""
        if self.megatron_identity is not None:
            return self.megatron_identity.unique_identifiers()
        return OrderedDict([("class", type(self).__name__), ("eod", self.eod), ("vocab_size", self.vocab_size)])


def make_tokenizer(entry: TokenizerEntry) -> Any:
    """Creates the tokenizer of an entry: an object with `eod`, `pad`, `vocab_size` and `unique_identifiers`.

    Raises:
        ArgumentError: its file is no tokenizer, or lacks a named token, or a library is not installed.
    """
    if entry.file is None:
        return StatedTokenizer(entry.eod or 0, entry.vocab_size or 1, entry.pad, entry.megatron)
    return open_tokenizer(
        entry.file,
        megatron_identity=entry.megatron,
        lower_case=entry.lower_case,
        eod_token=entry.eod_token,
        pad_token=entry.pad_token,
    )


def read_tokenizer(reader: TableReader, folder: Path) -> TokenizerEntry | None:
    """Reads `tokenizer`, a string or a table; None if there is none."""
    given = reader.take("tokenizer", _FILE_OR_TABLE)
    if given is None:
        return None
    if isinstance(given, str):
        return TokenizerEntry(file=_tokenizer_path(given, folder))
    table = reader.table("tokenizer")
    file, eod, vocab_size = table.take("file", TEXT), table.take("eod", WHOLE), table.take("vocab_size", WHOLE_POSITIVE)
    entry = TokenizerEntry(
        file=_tokenizer_path(file, folder),
        eod_token=table.take("eod_token", TEXT),
        pad_token=table.take("pad_token", TEXT),
        lower_case=bool(table.take("lower_case", FLAG)),
        eod=eod,
        pad=table.take("pad", WHOLE),
        vocab_size=vocab_size,
        megatron=_read_identity(table.table("megatron")),
    )
    _check_tokenizer(table, entry)
    table.refuse_unknown()
    return entry


def _tokenizer_path(file: str | None, folder: Path) -> str | None:
    return str(folder / file) if file and is_path(file) else file


def _check_tokenizer(table: TableReader, entry: TokenizerEntry) -> None:
    by_file = table.given("file", "eod_token", "pad_token", "lower_case")
    by_ids = table.given("eod", "vocab_size", "pad")
    if "file" not in by_file:
        for key in {"eod", "vocab_size"} - set(by_ids):
            table.refuse(key, "must be given, as eod and vocab_size describe the tokenizer if there is no file")
    for key in by_ids if "file" in by_file else by_file:
        table.refuse(
            key, f"must be omitted {'with' if 'file' in by_file else 'without'} tokenizer.file, found it given"
        )
    if entry.lower_case and entry.file is not None and not is_wordpiece(entry.file):
        table.refuse("lower_case", "must be false, as it is for WordPiece vocabularies (.txt), found true")
    for key, found in (("eod", entry.eod), ("pad", entry.pad)):
        if found is not None and entry.vocab_size is not None and found >= entry.vocab_size:
            table.refuse(key, f"must be below tokenizer.vocab_size {entry.vocab_size}, found {found}")


def _read_identity(table: TableReader) -> MegatronIdentity | None:
    if not table.keys:
        return None
    identity = MegatronIdentity(
        class_path=table.need("class", TEXT, ""),
        path=table.take("path", TEXT),
        options=table.take("options", TABLE, {}),
    )
    table.refuse_unknown()
    return identity


_MOST_ENTRIES: Final = 32
_TOKENS: Final = 4096
"""Tokens that are read of each."""


def check_token_ids(members: Iterable[Member], tokenizer: Any, problems: Problems) -> None:
    """Adds a problem for each `[[dataset]]` with tokens beyond the tokenizer's ids: those of another tokenizer.

    Reads the first tokens of one pair of each, on local disks.

    Args:
        members: the datasets.
        tokenizer: its `vocab_size` and `eod` limit the ids; without `vocab_size` nothing is checked.
        problems: collection that is added to.
    """
    num_ids = getattr(tokenizer, "vocab_size", None)
    if not is_integer(num_ids):
        return
    eod = getattr(tokenizer, "eod", None)
    num_ids = max(int(num_ids or 0), int(eod) + 1 if is_integer(eod) else 0)  # type: ignore[arg-type]  # an integer
    first_of_each = {member.entry.where: member for member in reversed(list(members))}
    for where, member in sorted(first_of_each.items())[:_MOST_ENTRIES]:
        if is_address(member.pairs[0]):
            continue
        found = _first_tokens(member.pairs[0])
        if found.size and (largest := found.max()) >= num_ids:
            problems.add(
                (*where, "path"),
                f"must have tokens of the blend's tokenizer, which are below {num_ids:,}, found {largest:,} in "
                f"{member.pairs[0]}.bin: another tokenizer made them",
            )


def _first_tokens(prefix: str) -> "np.ndarray[Any, Any]":
    dtype = IndexedDataset(prefix, open_when_read=True).index.dtype
    return np.fromfile(f"{prefix}.bin", dtype, _TOKENS)
