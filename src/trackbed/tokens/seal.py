"""The seal of a pair: `<prefix>.trackbed.json`, with sizes and checksums of its files (docs/formats/indexed.md)."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from trackbed.errors import FormatError
from trackbed.files import (
    CHUNK_BYTES,
    Checksum,
    FileSum,
    checksum_file,
    clear_dead_partials,
    flush_to_disk,
    new_partial,
    publish,
    read_regular,
    stores,
)
from trackbed.files.stores import is_address, parse_address
from trackbed.tokens.content import PairContent
from trackbed.tokens.paths import BESIDE, get_beside_path, get_seal_path
from trackbed.tokens.stored.config import default_idx_cache
from trackbed.tokens.stored.copies_beside import copy_beside

FORMAT: Final = "trackbed-seal"
VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_RECIPE: Final = ("made_by", "recipe", "counts")
_OPTIONAL: Final = (*_RECIPE, "beside")
_BESIDE_NAME: Final = re.compile(r"[a-z]{1,16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Expected counts, sizes and checksums of the two files of a pair."""

    dtype: str
    sequences: int
    documents: int
    chunk_bytes: int
    bin: FileSum
    idx: FileSum
    made_by: str | None = None
    """SHA-256 of `recipe`; None for a pair that is no shard."""
    recipe: dict[str, Any] | None = None
    """Everything that decides the bytes of a shard."""
    counts: dict[str, Any] | None = None
    """Counts of the records that a shard was made of."""
    beside: dict[str, FileSum] | None = None
    """Size and checksums of each file beside the pair, by its suffix without the dot; None if there are none."""

    def __post_init__(self) -> None:
        if self.chunk_bytes != CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be {CHUNK_BYTES}, found {self.chunk_bytes!r}")
        made_by, parts = self.made_by, (self.recipe, self.counts)
        is_shard = type(made_by) is str and _SHA256.fullmatch(made_by) and {*map(type, parts)} == {dict}
        if not is_shard and (made_by, *parts) != (None, None, None):
            what = f"{str(made_by)[:80]!r}, {str(parts)[:80]}"
            raise ValueError(
                f"made_by must be 64 hexadecimal digits beside the objects recipe and counts, found {what}"
            )

        if self.beside is not None and not (self.beside and all(map(_BESIDE_NAME.fullmatch, self.beside))):
            raise ValueError(f"beside must have suffixes of small letters, found {str(list(self.beside))[:80]}")

    @classmethod
    def of(
        cls, *, dtype: type[np.number[Any]], sequences: int, documents: int, data: Checksum, index: Checksum
    ) -> "Seal":
        """Creates the seal of files whose checksums are `data` and `index`."""
        return cls(
            dtype=np.dtype(dtype).name,
            sequences=sequences,
            documents=documents,
            chunk_bytes=CHUNK_BYTES,
            bin=FileSum.of(data),
            idx=FileSum.of(index),
        )


def seal(path_prefix: str, *, progress: Callable[[int], None] | None = None, idx_cache: str | None = None) -> Seal:
    """Writes the seal of a pair from its current files, replacing an older seal.

    Args:
        path_prefix: path or address of the pair without `.bin` and `.idx`.
        progress: called with the number of bytes of each piece that was read.
        idx_cache: folder of copies of `.idx` objects, for an address; None for `default_idx_cache()`.
    """
    content = PairContent.open(path_prefix, idx_cache=idx_cache)
    beside = {} if is_address(path_prefix) else _files_beside(path_prefix)
    new_seal = Seal.of(
        dtype=content.index.dtype,
        sequences=content.index.sequence_count,
        documents=content.index.document_count - 1,
        data=content.checksum_bin(progress),
        index=content.checksum_idx(progress),
    )
    new_seal = _with_recipe(new_seal, get_seal_path(path_prefix))
    if not is_address(path_prefix):
        sums = {name: FileSum.of(checksum_file(path, progress=progress)) for name, path in beside.items()}
        new_seal = replace(new_seal, beside=sums or None)
    if is_address(path_prefix):
        stores.put_bytes(parse_address(get_seal_path(path_prefix)), encode_seal(new_seal))
        return new_seal
    final = Path(get_seal_path(path_prefix))
    clear_dead_partials(final.parent, final_name=final.name)
    partial = new_partial(final)
    try:
        write_seal(new_seal, partial)
        flush_to_disk(partial)
        publish(partial, final)
    finally:
        partial.unlink(missing_ok=True)
    return new_seal


def find_beside(path_prefix: str, name: str, *, idx_cache: str | None = None) -> tuple[Path, FileSum, int] | None:
    """Finds a file beside a pair, by its seal.

    Args:
        path_prefix: path or address of the pair without `.bin` and `.idx`.
        name: suffix of the file without the dot.
        idx_cache: folder of copies of objects, for an address; None for `default_idx_cache()`.

    Returns:
        Its path, or that of a copy of the object, its size and checksum, and the number of documents of the pair; None
        if the seal does not name it.

    Raises:
        FormatError: the seal is damaged, or the object is not the one that it names.
        FileNotFoundError: the object is missing.
        StoreError: an object store refuses, or does not answer in time.
    """
    try:
        sealed = read_seal(get_seal_path(path_prefix))
    except FileNotFoundError:
        return None
    wanted = (sealed.beside or {}).get(name)
    if wanted is None:
        return None
    path = get_beside_path(path_prefix, name)
    if is_address(path_prefix):
        return copy_beside(path, wanted, idx_cache or default_idx_cache()), wanted, sealed.documents
    return Path(path), wanted, sealed.documents


def missing_beside(path_prefix: str) -> list[str]:
    """Returns the names of the files beside a pair on a disk that its seal names, and that are not there."""
    try:
        sealed = {} if is_address(path_prefix) else read_seal(get_seal_path(path_prefix)).beside or {}
    except (FileNotFoundError, FormatError):
        return []
    return [name for name in sealed if not Path(get_beside_path(path_prefix, name)).exists()]


def sum_beside(path_prefix: str, name: str) -> str:
    """Returns the checksums of a file beside a pair, as its seal has them; empty if that names none.

    Args:
        path_prefix: path or address of the pair without `.bin` and `.idx`.
        name: suffix of the file without the dot.

    Raises:
        FormatError: the seal is damaged.
        StoreError: an object store refuses, or does not answer in time.
    """
    try:
        found = (read_seal(get_seal_path(path_prefix)).beside or {}).get(name)
    except FileNotFoundError:
        return ""
    return "" if found is None else "-".join(found.crc32)


def _files_beside(path_prefix: str) -> dict[str, Path]:
    """Returns the files beside a pair on a disk, by name."""
    paths = {name: Path(get_beside_path(path_prefix, name)) for name in BESIDE}
    found = {name: path for name, path in paths.items() if path.exists()}
    for path in found.values():
        if not path.is_file():
            raise FormatError(f"{path}: must be a file, found something else: remove it")
    return found


def _with_recipe(new_seal: Seal, path: str) -> Seal:
    """Returns a seal with what the old one says about how the pair was made, if its bytes are the same."""
    try:
        old = read_seal(path)
    except (FormatError, FileNotFoundError):
        return new_seal
    if (old.bin, old.idx) != (new_seal.bin, new_seal.idx):
        return new_seal
    kept = replace(new_seal, **{name: getattr(old, name) for name in _RECIPE})
    return replace(kept, beside=old.beside) if is_address(path) else kept  # objects beside a pair stay as they are


def write_seal(sealed: Seal, path: Path) -> None:
    """Writes `sealed` as JSON to the new file `path`."""
    with path.open("xb") as file:
        file.write(encode_seal(sealed))


def encode_seal(sealed: Seal) -> bytes:
    """Returns the content of a seal's file."""
    fields = {key: value for key, value in asdict(sealed).items() if key not in _OPTIONAL or value is not None}
    return (json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1) + "\n").encode()


def read_seal(path: str | Path) -> Seal:
    """Reads the seal in the file or object at `path`.

    Raises:
        FormatError: the file is not a seal, or has another version.
        FileNotFoundError: there is no such file.
        StoreError: an object store refuses, or does not answer in time.
    """
    if is_address(path):
        _, raw = stores.read_object(parse_address(str(path)), most_bytes=_MOST_BYTES)
    else:
        raw = read_regular(path)
    return parse_seal(raw, where=str(path))


def parse_seal(raw: bytes, *, where: str) -> Seal:
    """Parses the content of a seal.

    Args:
        raw: content of the file.
        where: its path or address, for error messages.

    Raises:
        FormatError: it is no seal, or has another version.
    """
    try:
        fields = json.loads(raw)
        found = (fields.pop("format"), fields.pop("version"))
        if found != (FORMAT, VERSION):
            raise FormatError(f"{where}: the format and version must be {(FORMAT, VERSION)}, found {str(found)[:200]}")
        files: dict[str, Any] = {name: FileSum.from_json(fields.pop(name)) for name in ("bin", "idx")}
        if (beside := fields.pop("beside", None)) is not None:
            files["beside"] = {name: FileSum.from_json(one) for name, one in beside.items()}
        return Seal(**{**fields, **files})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{where}: a seal must be a JSON object with the fields of docs/formats/indexed.md: {str(error)[:200]}"
        ) from error
