"""The tokenizer that a blend file names, or says what datasets must know of."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trackbed.builder.blend_file.description import TokenizerEntry
from trackbed.builder.blend_file.tables import TABLE, TEXT, WHOLE, WHOLE_POSITIVE, Rule, TableReader
from trackbed.datasets.adapters import ByteTokenizer, HuggingFaceTokenizer, MegatronIdentity

__all__ = ["StatedTokenizer", "make_tokenizer", "read_tokenizer"]

_FILE_OR_TABLE: Final = Rule("the name of a file, or a table", lambda value: TEXT.holds(value) or TABLE.holds(value))


@dataclass(frozen=True, slots=True)
class StatedTokenizer:
    """What datasets know of a tokenizer that is not here: all that building indices needs."""

    eod: int
    """Id that ends a document."""
    vocab_size: int
    """Ids are in `[0, vocab_size)`."""
    pad: int | None = None
    """Id that fills up short samples, or None."""
    megatron_identity: MegatronIdentity | None = None
    """What it is called in a Megatron job that is to share the cache."""

    @property
    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """What the names of indices are made from."""
        if self.megatron_identity is not None:
            return self.megatron_identity.unique_identifiers()
        return OrderedDict([("class", type(self).__name__), ("eod", self.eod), ("vocab_size", self.vocab_size)])


def make_tokenizer(entry: TokenizerEntry) -> Any:
    """The tokenizer that an entry means: an object with `eod`, `pad`, `vocab_size` and `unique_identifiers`.

    Raises:
        ArgumentError: its file is no tokenizer, or lacks a token that was named.
    """
    if entry.file is None:
        return StatedTokenizer(entry.eod or 0, entry.vocab_size or 1, entry.pad, entry.megatron)
    if entry.file == "bytes":
        return ByteTokenizer(megatron_identity=entry.megatron)
    return HuggingFaceTokenizer(
        entry.file, eod_token=entry.eod_token, pad_token=entry.pad_token, megatron_identity=entry.megatron
    )


def read_tokenizer(reader: TableReader, folder: Path) -> TokenizerEntry | None:
    """What `tokenizer` says, as a text or as a table; None where there is none."""
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
        eod=eod,
        pad=table.take("pad", WHOLE),
        vocab_size=vocab_size,
        megatron=_read_identity(table.table("megatron")),
    )
    _check_tokenizer(table, entry)
    table.done()
    return entry


def _tokenizer_path(file: str | None, folder: Path) -> str | None:
    return file if file in (None, "", "bytes") else str(folder / str(file))


def _check_tokenizer(table: TableReader, entry: TokenizerEntry) -> None:
    by_file = table.given("file", "eod_token", "pad_token")
    by_ids = table.given("eod", "vocab_size", "pad")
    if "file" not in by_file:
        for key in {"eod", "vocab_size"} - set(by_ids):
            table.refuse(key, "must be given, as eod and vocab_size stand for the tokenizer where no file does")
    for key in by_ids if "file" in by_file else by_file:
        table.refuse(
            key, f"must be left out {'with' if 'file' in by_file else 'without'} tokenizer.file, found it given"
        )
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
    table.done()
    return identity
