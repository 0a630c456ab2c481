"""Models of checkpoints as files of safetensors, and the reverse. In one process, without `torch.distributed`."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from trackbed.checkpoint.folder import CheckpointFolder, any_folder, local_folder, open_folder
from trackbed.checkpoint.format.catalogue import StoredTensor
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA
from trackbed.checkpoint.format.safetensors_files import (
    INDEX_NAME,
    METADATA,
    NAMES,
    SUFFIX,
    encode_header,
    has_files,
    read_folder,
)
from trackbed.checkpoint.io.box_parts import Numbers, cut_box
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.io.file_writer import Bytes, FileWriter
from trackbed.checkpoint.save import save
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.comm import SOLO
from trackbed.daemon_threads import DaemonThreads
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.publish import remove_partial, write_new
from trackbed.files.publish_folder import commit_folder, flush_files, make_partial_folder

Progress = Callable[[int, int], None]
MODEL: Final = "model."
_OPTIMIZERS: Final = {"optimizer", "optim"}
_SLAB_BYTES: Final = 32 << 20
FILE_BYTES: Final = 5_000_000_000
"""Bytes of tensors in one file, by default, as in Hugging Face's libraries."""


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """Tensor that is exported."""

    name: str
    """Name in the files."""
    key: str
    """Key in the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def export_model(
    folder: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    rename: Mapping[str, str] | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Progress = lambda _, __: None,
) -> list[ExportedTensor]:
    """Writes the model of a checkpoint in Hugging Face's layout of safetensors.

    These are the tensors under "model.", without that prefix; if there are none, all but those under "optimizer" or
    "optim". Of
    tensors with several names, such as tied weights, the first name is written alone. The folder appears whole or not
    at all; about 100 MiB of memory are used.

    Args:
        folder: folder of the checkpoint, of Trackbed, torch or Megatron Core.
        target: folder to create.
        dtype: type of tensors of floating point; None for their own.
        rename: new names by name; others stay.
        file_bytes: size of the tensors of one file. A larger tensor has a file of its own.
        progress: called with the bytes that are written so far, and the bytes in all.

    Returns:
        The tensors, in the order of their names.

    Raises:
        CheckpointError: there is no model, it is damaged, or a type has no name in safetensors.
        ArgumentError: two tensors get one name, or an argument is out of range.
        FileExistsError: the target is there, and is no empty folder.
        OSError: a file cannot be written.
    """
    _check_options(dtype, rename, file_bytes)
    opened = open_folder(any_folder(folder))
    stamps = _stamps(opened)
    tensors = find_model(opened, dtype=dtype, rename=rename or {})
    files = divide(tensors, file_bytes)
    final = local_folder(target).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = make_partial_folder(final, may_replace=lambda _: False)
    done, total = 0, sum(tensor.num_bytes for tensor in tensors)

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    try:
        for name, members in files.items():
            _write_file(partial / name, members, opened, advance)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {tensor.name: name for name, members in files.items() for tensor in members},
            }
            write_new(partial / INDEX_NAME, json.dumps(index, indent=2).encode())
            flush_files([partial / INDEX_NAME])
        _require_unchanged(opened, stamps)
        commit_folder(partial, final, may_replace=lambda _: False)
    except BaseException:
        remove_partial(partial)
        raise
    return tensors


def _require_unchanged(opened: CheckpointFolder, stamps: dict[str, tuple[int, int, int] | None]) -> None:
    if _stamps(opened) != stamps:
        raise CheckpointError(f"{opened.path}: must stay as it is during the export, but was changed or replaced")


def _check_options(dtype: Any, rename: Any, file_bytes: Any) -> None:
    if isinstance(file_bytes, bool) or not isinstance(file_bytes, int) or file_bytes < 1:
        raise ArgumentError(f"file_bytes must be an integer of at least 1, but is {file_bytes!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"dtype must be a type of torch of floating point, but is {dtype!r}")
    names = {} if rename is None else rename
    if not isinstance(names, Mapping) or not all(isinstance(one, str) for pair in names.items() for one in pair):
        raise ArgumentError(f"rename must have new names by name, but is {str(rename)[:80]}")


def _stamps(opened: CheckpointFolder) -> dict[str, tuple[int, int, int] | None]:
    """Inode, size and time of each file, which a file that takes its place does not have."""
    found: dict[str, tuple[int, int, int] | None] = {}
    if not isinstance(opened.path, Path):
        return found  # of objects, one version is read
    for name in (DCP_METADATA, *opened.catalogue.files):
        try:
            status = (opened.path / name).stat()
        except OSError:
            found[name] = None
        else:
            found[name] = status.st_ino, status.st_size, status.st_mtime_ns
    return found


def find_model(
    opened: CheckpointFolder, *, dtype: torch.dtype | None, rename: Mapping[str, str]
) -> list[ExportedTensor]:
    """Tensors of the model of a checkpoint, in the order of their names in the files.

    Raises:
        CheckpointError: there are none, or one is of a type that has no name in safetensors.
        ArgumentError: two get one name, or a name that is to be changed is not there.
    """
    catalogue = opened.catalogue
    keys = [key for key in catalogue.tensors if key.startswith(MODEL)]
    names = {key: key.removeprefix(MODEL) for key in keys}
    if not keys:
        names = {key: key for key in catalogue.tensors if _OPTIMIZERS.isdisjoint(key.split("."))}
    if not names:
        plain = " Its model is a plain value: save sharded_state(model)." if "model" in opened.load_common() else ""
        raise CheckpointError(f"{opened.path}: must have tensors of a model, but has none.{plain}")
    unknown = sorted(set(rename) - set(names.values()))
    if unknown:
        raise ArgumentError(
            f"rename: must have names of the model, such as {min(names.values())!r}, found {unknown[0]!r}"
        )
    found: dict[str, ExportedTensor] = {}
    places: set[tuple[int, int]] = set()
    for key, old in names.items():
        stored = catalogue.tensors[key]
        if stored.rows and prod(stored.shape):
            place = int(catalogue.file[stored.rows[0]]), int(catalogue.start[stored.rows[0]])
            if place in places:  # another name of a tensor that is there already
                if old in rename:
                    raise ArgumentError(f"rename: must have names that are written, but {old!r} is a second name")
                continue
            places.add(place)
        name = rename.get(old, old)
        if name == METADATA:
            raise ArgumentError(f"rename: must give {old!r} another name, since {METADATA!r} is none of a tensor")
        if name in found:
            raise ArgumentError(f"rename: must give each tensor a name of its own, but gives {name!r} to two")
        kind = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        if kind not in NAMES:
            raise CheckpointError(f"{key}: must be of a type that safetensors has, but is of {kind}")
        found[name] = ExportedTensor(name, key, kind, stored.shape)
    return [found[name] for name in sorted(found)]


def divide(tensors: list[ExportedTensor], file_bytes: int) -> dict[str, list[ExportedTensor]]:
    """Divides tensors among files, in order.

    >>> ones = [ExportedTensor(name, name, torch.uint8, (3,)) for name in "ab"]
    >>> list(divide(ones, 5)), list(divide(ones, 6))
    (['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'], ['model.safetensors'])
    """
    files: list[list[ExportedTensor]] = []
    size = 0
    for tensor in tensors:
        if not files or size + tensor.num_bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.num_bytes
    if len(files) == 1:
        return {f"model{SUFFIX}": files[0]}
    return {f"model-{number:05}-of-{len(files):05}{SUFFIX}": one for number, one in enumerate(files, start=1)}


def _write_file(
    path: Path, tensors: list[ExportedTensor], opened: CheckpointFolder, advance: Callable[[int], None]
) -> None:
    header = encode_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, {"format": "pt"})
    with FileWriter(path) as file, BoxReader(opened.path, opened.catalogue) as reader:
        file.write(header)
        with opened.naming_replacement(), closing(_read_ahead(tensors, reader, opened.catalogue.tensors)) as slabs:
            for slab in slabs:
                file.write(slab.data)
                advance(len(slab))
        file.finish()


def _read_ahead(
    tensors: list[ExportedTensor], reader: BoxReader, stored: Mapping[str, StoredTensor]
) -> Generator[Bytes]:
    """Yields the bytes of tensors in order, some at a time; a thread reads the next ones meanwhile.

    An array is used again once the one after it has been asked for.

    Args:
        tensors: tensors.
        reader: reads them.
        stored: what the checkpoint has, by key.
    """
    buffers = cycle(np.empty(_SLAB_BYTES, np.uint8) for _ in range(2))

    def read(tensor: ExportedTensor, first: Numbers, shape: Numbers, buffer: Bytes) -> Bytes:
        num_bytes = prod(shape) * tensor.dtype.itemsize
        slab = buffer[:num_bytes]
        box = torch.from_numpy(slab).view(tensor.dtype).view(shape)
        fill(tensor, first, box)
        kind = stored[tensor.key].dtype
        if _may_overflow(kind, tensor.dtype) and not _is_finite(box):
            own = torch.empty(shape, dtype=kind, device="cpu")
            fill(tensor, first, own)
            if not torch.equal(own.double().isfinite(), box.double().isfinite()):
                raise CheckpointError(
                    f"{tensor.key}: must have values of {tensor.dtype}, but has larger ones: leave dtype out"
                )
        return slab

    def fill(tensor: ExportedTensor, first: Numbers, box: torch.Tensor) -> None:
        with torch.no_grad():
            count = reader.read_box(tensor.key, box, first)
        if count != box.numel():
            raise CheckpointError(f"{tensor.key}: all elements of the box at {first} must be stored, but {count:,} are")

    with DaemonThreads("trackbed-export") as thread:
        ahead: Future[Bytes] | None = None
        for (tensor, first, shape), buffer in zip(_slabs(tensors), buffers, strict=False):
            following = thread.submit(partial(read, tensor, first, shape, buffer))
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def _may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """True if a type has values that are too large for another one."""
    are_floats = source.is_floating_point and target.is_floating_point
    return are_floats and torch.finfo(target).max < torch.finfo(source).max


def _is_finite(box: torch.Tensor) -> bool:
    """True if all elements are finite. Takes no memory of the size of the box, but for types of one byte."""
    wide = box.float() if box.itemsize == 1 else box
    return bool(wide.sum(dtype=torch.float64).isfinite())


def _slabs(tensors: list[ExportedTensor]) -> Iterator[tuple[ExportedTensor, Numbers, Numbers]]:
    """Yields boxes of tensors that fit into one buffer, in order: the tensor, the box's first element and its shape."""
    for tensor in tensors:
        if 0 not in tensor.shape:
            for first, shape in cut_box((0,) * len(tensor.shape), tensor.shape, tensor.dtype.itemsize, _SLAB_BYTES):
                yield tensor, first, shape


def import_model(folder: str | Path, target: str | Path, *, prefix: str = MODEL) -> int:
    """Makes a checkpoint of a folder of safetensors.

    Args:
        folder: folder with `model.safetensors`, or several files and their index.
        target: folder of the checkpoint; an earlier checkpoint there is replaced.
        prefix: text before the names. "model." is that of `load_sharded_state`.

    Returns:
        Number of tensors.

    Raises:
        CheckpointError: there are no such files, or they are damaged.
        OSError: a file cannot be written.
    """
    source = local_folder(folder)
    if not has_files(source):
        raise CheckpointError(f"{source}: must have files that end in {SUFFIX}, but has none")
    state: dict[str, Any] = {}
    for name, tensors, first in read_folder(source):
        for key, place in tensors.items():
            data = _mapped(source / name, first + place.start, place.stop - place.start)
            zeros = (0,) * len(place.shape)
            data = data.view(place.dtype).view(place.shape)
            state[key] = ShardedTensor(f"{prefix}{key}", data, place.dtype, place.shape, place.shape, zeros, None)
    save(state, target, group=SOLO)
    return len(state)


def _mapped(path: Path, start: int, num_bytes: int) -> torch.Tensor:
    """Bytes of a file, whose pages are read as they are used, and take no memory of this process."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.asarray(np.memmap(path, np.uint8, "c", start, (num_bytes,))))
