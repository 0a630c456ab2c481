"""Inventory of the folder of a cache, entries, whole or not, and partial files, and its verification, byte for byte.

Nothing is changed.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from trackbed.cache.entry import fingerprint
from trackbed.cache.lookup import array_problem, size_problems
from trackbed.cache.manifest import Manifest, read_manifest
from trackbed.cache.notes import NoteFile, Use, entry_digest, find_note_files, find_uses, last_uses
from trackbed.cache.npy import read_npy_header, read_npy_start
from trackbed.errors import FormatError
from trackbed.files import Chunk, PartialFile, Stamp, Writer, chunks_of, compare_chunks, find_partials, open_regular

_STEM: Final = re.compile(r"[0-9a-f]{32}-(?P<cls>\w+?)(?:-(?P<split>train|valid|test))?")
_FILE: Final = re.compile(r"(?P<stem>[^/]+)-(?P<what>description\.txt|\w+\.npy)")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_ARRAYS: Final = (
    frozenset(("document_index", "sample_index", "shuffle_index")),
    frozenset(("dataset_index", "dataset_sample_index")),
    frozenset(("sample_index",)),
)
"""Which arrays make an entry of Megatron Core's: of a dataset, of a blend, of a masked dataset."""


class Condition(Enum):
    """Condition of an entry."""

    whole = "whole"
    damaged = "damaged"
    """It is not served, and is built again when it is requested."""
    unknown = "of another version"
    """Its manifest is of another version, so its state is not known."""


class CacheFile(NamedTuple):
    """A file of an entry."""

    path: str
    stamp: Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """An entry as it lies in the folder."""

    directory: str
    stem: str
    class_name: str
    """Empty where the stem does not say."""
    split: str
    """Empty where the stem does not say."""
    fingerprint: str
    """Empty where no manifest of this version says."""
    is_aside: bool
    """True if it lies under its fingerprint, and not under Megatron Core's name."""
    manifest: CacheFile | None
    """None where Megatron Core wrote it."""
    record: Manifest | None
    """Content of the manifest, if it is of this version."""
    files: tuple[CacheFile, ...]
    """Without the manifest, the description first."""
    last_used: float
    """Seconds since 1970: when it was written, or the latest note of its use."""
    condition: Condition
    problems: tuple[str, ...]
    """Problems of a damaged entry, each beginning with a path."""

    @property
    def size_bytes(self) -> int:
        """Size of all its files."""
        manifest = 0 if self.manifest is None else self.manifest.stamp.size_bytes
        return manifest + sum(file.stamp.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Name of the entry in notes; empty where its manifest does not tell."""
        if self.record is None or self.manifest is None:
            return ""
        stamps = {file.path: file.stamp for file in self.files}
        paths = [f"{self.path}-description.txt", *(f"{self.path}-{name}.npy" for name in self.record.arrays)]
        found = [stamps.get(path, (-1, -1, -1)) for path in paths]
        return entry_digest(np.array([*found, self.manifest.stamp], dtype=np.int64))

    @property
    def path(self) -> str:
        """The path that its files begin with."""
        return f"{self.directory}/{self.stem}"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The content of a cache."""

    entries: tuple[StoredEntry, ...]
    """By path."""
    partials: tuple[PartialFile, ...]
    uses: tuple[Use, ...] = field(repr=False)
    notes: tuple[NoteFile, ...] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Size of all entries."""
        return sum(entry.size_bytes for entry in self.entries)


def take_inventory(folder: str) -> Inventory:
    """Examines every entry of the cache in `folder`; reads no more than manifests and headers.

    Files without a manifest are taken for an entry if their names begin with an md5, as Megatron Core's do.

    Raises:
        OSError: the folder cannot be read.
    """
    own_folder = f"{folder}/.trackbed"
    uses = tuple(find_uses(own_folder))
    latest = last_uses(uses)
    own_names = os.listdir(own_folder) if os.path.isdir(own_folder) else []
    manifests = {name.removesuffix(".json"): f"{own_folder}/{name}" for name in own_names if name.endswith(".json")}
    entries = _entries_in(folder, manifests, latest)
    for name in own_names:
        if _FINGERPRINT.fullmatch(name) and os.path.isdir(f"{own_folder}/{name}"):
            entries += _entries_aside(f"{own_folder}/{name}", latest)
    partial = f"{own_folder}/partial"
    partials = find_partials(Path(partial)) if os.path.isdir(partial) else []
    return Inventory(
        tuple(sorted(entries, key=lambda entry: entry.path)),
        tuple(partials),
        uses,
        tuple(find_note_files(own_folder)),
    )


def _entries_in(folder: str, manifests: Mapping[str, str], latest: Mapping[str, float]) -> list[StoredEntry]:
    """Returns the entries under Megatron Core's names; their manifests are given by stem."""
    by_stem = _files_by_stem(folder)
    stems = {stem for stem in by_stem if stem in manifests or _STEM.fullmatch(stem)} | set(manifests)
    return [
        _describe(folder, stem, by_stem.get(stem, []), manifests.get(stem), latest, is_aside=False)
        for stem in sorted(stems)
    ]


def _entries_aside(folder: str, latest: Mapping[str, float]) -> list[StoredEntry]:
    """Returns the entry that lies under its fingerprint, if there is one."""
    manifest = f"{folder}/manifest.json"
    try:
        by_stem = _files_by_stem(folder)
    except FileNotFoundError:  # it was removed since its name was read
        return []
    if not by_stem and os.path.exists(manifest):
        by_stem = {"": []}
    return [_describe(folder, stem, files, manifest, latest, is_aside=True) for stem, files in by_stem.items()]


def _files_by_stem(folder: str) -> dict[str, list[CacheFile]]:
    by_stem: defaultdict[str, list[CacheFile]] = defaultdict(list)
    for name in sorted(os.listdir(folder)):
        if (match := _FILE.fullmatch(name)) and (file := _stored(f"{folder}/{name}")):
            by_stem[match["stem"]].append(file)
    return dict(by_stem)


def _stored(path: str) -> CacheFile | None:
    """Returns the file at `path`; None if it was removed meanwhile."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError:  # a link to itself: reading it says so
        status = os.lstat(path)
    return CacheFile(path, Stamp.of(status))


def _describe(
    folder: str,
    stem: str,
    files: Iterable[CacheFile],
    manifest_path: str | None,
    latest: Mapping[str, float],
    *,
    is_aside: bool,
) -> StoredEntry:
    files = sorted(files, key=lambda file: (file.path.endswith(".npy"), file.path))
    manifest = None if manifest_path is None else _stored(manifest_path)
    record, problems = _read(manifest)
    is_unknown = record is not None and not record.fingerprint
    if record is None and not problems:
        problems = _judge_by_headers(f"{folder}/{stem}", files)
    elif record is not None and not is_unknown:
        sizes = {file.path.rpartition("/")[2]: file.stamp.size_bytes for file in files}
        problems = list(size_problems(folder, record.files, sizes))
    named = _STEM.fullmatch(stem)
    written = [file.stamp.modified_ns / 1e9 for file in (*files, *([manifest] if manifest else []))]
    noted = [latest.get(name, 0.0) for name in (stem, folder.rpartition("/")[2] if is_aside else stem)]
    return StoredEntry(
        directory=folder,
        stem=stem,
        class_name=(named and named["cls"]) or "",
        split=(named and named["split"]) or "",
        fingerprint=record.fingerprint if record is not None else "",
        is_aside=is_aside,
        manifest=manifest,
        record=None if is_unknown else record,
        files=tuple(files),
        last_used=max(*written, *noted),
        condition=Condition.unknown if is_unknown else Condition.damaged if problems else Condition.whole,
        problems=tuple(problems),
    )


def _read(manifest: CacheFile | None) -> tuple[Manifest | None, list[str]]:
    """Returns the content of a manifest, or what is wrong with it; neither if there is none."""
    try:
        return (None if manifest is None else read_manifest(manifest.path)), []
    except FormatError as error:
        return None, [str(error)]
    except OSError as error:
        return None, [f"{error.filename}: {error.strerror}"]


def _judge_by_headers(path: str, files: Iterable[CacheFile]) -> list[str]:
    """Returns what is wrong with an entry that has no manifest."""
    paths = {file.path.removeprefix(f"{path}-").removesuffix(".npy"): file.path for file in files}
    problems = []
    if not ("description.txt" in paths and paths.keys() - {"description.txt"} in _ARRAYS):
        problems.append(f"{path}-*: must have a description and all arrays of an index, found {sorted(paths)}")
    paths.pop("description.txt", None)
    return [*problems, *(found[1] for array in paths.values() if (found := array_problem(array, None)) is not None)]


_MOST_BYTES: Final = 64 << 10
"""Beginning of a description that is read: a blend of thousands of datasets has a description of megabytes."""
_FIELD: Final = re.compile(r'^    "(class|dataset_path|index_split|split)": ("(?:[^"\\]|\\.)*")', re.MULTILINE)


class Described(NamedTuple):
    """Dataset, split and class of an entry; a field is empty if it is not known."""

    dataset: str
    """Prefix of the dataset, or the number of datasets of a blend."""
    split: str
    class_name: str


def describe_stored(entry: StoredEntry) -> Described:
    """Reads what an entry is the index of. Reads no more than the beginning of its description."""
    text = _beginning(entry)
    found = {name: json.loads(value) for name, value in reversed(_FIELD.findall(text))}  # the first one counts
    is_one = "dataset_path" in found
    return Described(
        dataset=found["dataset_path"] if is_one else _blend(entry, text),
        split=entry.split or found.get("index_split" if is_one else "split", ""),
        class_name=entry.class_name or found.get("class", ""),
    )


def _blend(entry: StoredEntry, text: str) -> str:
    if not text.startswith("{"):
        return text.partition("\n")[0]  # of the balanced order: a sentence
    number = entry.record.decisions.get("num_datasets") if entry.record is not None else None
    return f"blend of {number} datasets" if number else "blend"


def _beginning(entry: StoredEntry) -> str:
    """Returns the beginning of the description; empty if it cannot be read."""
    path = next((file.path for file in entry.files if file.path.endswith("description.txt")), None)
    if path is None:
        return ""
    try:
        with open(open_regular(path)[0], "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, FormatError):
        return ""


def bytes_to_read(inventory: Inventory) -> int:
    """Returns the number of bytes that `find_problems` reads."""
    return sum(chunk.size_bytes for chunk in _chunks(inventory))


def find_problems(inventory: Inventory, *, progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yields the problems of a cache: one line each, which begins with a path.

    Files are compared with their manifests, byte for byte, by all cores; entries without a manifest by their headers.
    Partial files of dead writers are reported too. An entry that is removed or built meanwhile may be reported.

    Args:
        inventory: content of the cache.
        progress: called with the number of bytes after each chunk read.
    """
    for entry in inventory.entries:
        yield from entry.problems
        if entry.record is not None and fingerprint(entry.record.decisions) != entry.fingerprint:
            path = entry.manifest.path if entry.manifest is not None else entry.path
            yield f"{path}: the fingerprint must be that of the decisions, found {entry.fingerprint}"
        yield from _compare_headers(entry)
    for chunk, problem in compare_chunks(_chunks(inventory)):
        if problem:
            yield problem
        if progress is not None:
            progress(chunk.size_bytes)
    for partial in inventory.partials:
        if partial.writer is Writer.dead:
            yield f"{partial.path}: a partial file must have a living writer, found that this one's has died"


def _compare_headers(entry: StoredEntry) -> Iterator[str]:
    """Compares the headers of a whole entry's arrays with its manifest."""
    if entry.record is None or entry.condition is not Condition.whole:
        return
    for name, spec in entry.record.arrays.items():
        path = f"{entry.path}-{name}.npy"
        try:
            header = read_npy_header(read_npy_start(path), path=path)
        except (FormatError, OSError) as error:
            yield str(error) if isinstance(error, FormatError) else f"{path}: {error.strerror}"
            continue
        if (header.dtype, header.shape) != (spec.dtype, spec.shape):
            found = f"{header.dtype} of shape {header.shape}"
            yield f"{path}: must hold {spec.dtype} of shape {spec.shape}, found {found}"


def _chunks(inventory: Inventory) -> Iterator[Chunk]:
    """Yields all chunks whose checksums are known, of files that have the right size."""
    for entry in inventory.entries:
        sums = {} if entry.record is None else entry.record.files
        for file in entry.files:
            found = sums.get(file.path.rpartition("/")[2])
            if found is not None and found.size_bytes == file.stamp.size_bytes:
                yield from chunks_of(file.path, found)
