"""Verification of a cache: every byte is compared with the manifests."""

from collections.abc import Callable, Iterator

from trackbed.cache.entry import fingerprint
from trackbed.cache.inventory import Condition, Inventory, StoredEntry
from trackbed.cache.npy import read_npy_header, read_npy_start
from trackbed.errors import FormatError
from trackbed.files import Chunk, Writer, chunks_of, compare_chunks


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
    for name, wanted in entry.record.arrays.items():
        path = f"{entry.path}-{name}.npy"
        try:
            header = read_npy_header(read_npy_start(path), path=path)
        except (FormatError, OSError) as error:
            yield str(error) if isinstance(error, FormatError) else f"{path}: {error.strerror}"
            continue
        if (header.dtype, header.shape) != (wanted.dtype, wanted.shape):
            found = f"{header.dtype} of shape {header.shape}"
            yield f"{path}: must hold {wanted.dtype} of shape {wanted.shape}, found {found}"


def _chunks(inventory: Inventory) -> Iterator[Chunk]:
    """Yields all chunks whose checksums are known, of files that have the right size."""
    for entry in inventory.entries:
        sums = {} if entry.record is None else entry.record.files
        for file in entry.files:
            found = sums.get(file.path.rpartition("/")[2])
            if found is not None and found.size_bytes == file.stamp.size_bytes:
                yield from chunks_of(file.path, found)
