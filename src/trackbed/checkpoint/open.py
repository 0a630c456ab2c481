"""Opens a checkpoint to read parts of it without a state dictionary, and finds the last one in a folder."""

import logging
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from trackbed.checkpoint.folder import CheckpointFolder, any_folder, open_folder
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA
from trackbed.checkpoint.format.marker import is_save_id
from trackbed.checkpoint.io.boxes import BoxReader, BoxToFill, fill_boxes
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.load import require_covered, require_loadable
from trackbed.checkpoint.ranks import Ranks, meet
from trackbed.checkpoint.state.divided_tensors import divided_tensor, is_divided, parts_to_load, undivided_tensor
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.stores import is_address
from trackbed.plural import number_of

logger = logging.getLogger(__name__)
_NUMBER: Final = re.compile(r"[0-9]+\Z")


class TensorReader:
    """Tensor of a checkpoint. `reader[1:3, ..., 5]` reads a part of it into memory that the result owns.

    Args:
        folder: opened checkpoint.
        key: key of the tensor.
    """

    def __init__(self, folder: CheckpointFolder, key: str) -> None:
        self._folder = folder
        self._key = key
        stored = folder.catalogue.tensors[key]
        self.dtype: torch.dtype = stored.dtype
        """Type of the elements."""
        self.shape: tuple[int, ...] = stored.shape
        """Shape of the whole tensor."""

    def __repr__(self) -> str:
        """Says what the tensor is; reads no element."""
        return f"<TensorReader of {self._key}: {list(self.shape)}, {self.dtype}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Reads a part: integers, slices with steps of 1, and at most one `...`, as for a tensor.

        Raises:
            ArgumentError: the index is something else, or has too many axes.
            IndexError: an integer is out of range.
            CheckpointError: a file is damaged, or the checkpoint lacks elements.
        """
        slices, dropped = self._slices(index if isinstance(index, tuple) else (index,))
        shape = tuple(part.stop - part.start for part in slices)
        first = tuple(part.start for part in slices)
        require_covered(self._folder.catalogue, self._key, first, shape)
        try:
            target = torch.empty(shape, dtype=self.dtype, device="cpu")
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._key}: {prod(shape):,} elements of {self.dtype} must fit into memory, but do not"
            ) from error
        with self._folder.naming_replacement(), BoxReader(self._folder.path, self._folder.catalogue) as reader:
            reader.read_box(self._key, target, first)
        return target[tuple(0 if axis in dropped else slice(None) for axis in range(len(shape)))]

    def fill(self, target: torch.Tensor) -> None:
        """Fills a tensor, or this rank's part of a `DTensor`, where it lies. Does not communicate.

        Args:
            target: tensor with the shape and type of the stored one.

        Raises:
            CheckpointError: it has another shape or type or no memory of its own, a file is damaged, or the checkpoint
                lacks elements.
        """
        if not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
            raise ArgumentError(f"{self._key}: the tensor to fill must be dense, found {type(target).__name__}")
        if target.dtype != self.dtype:
            raise CheckpointError(
                f"{self._key}: is stored in {self.dtype}, but the tensor to fill is of {target.dtype}"
            )
        entry = divided_tensor(target, self._key) if is_divided(target) else undivided_tensor(target, (self._key,))
        if entry is None:
            return  # this rank has no part of it
        parts = parts_to_load(entry, target, self._key).build().values()
        for part in parts:
            require_loadable(part, self._folder.catalogue, allow_cast=False)
        places = [BoxToFill(self._key, part.data, part.global_offset) for part in parts if part.data.numel()]
        with self._folder.naming_replacement():
            fill_boxes(places, self._folder.path, self._folder.catalogue, lambda: None)
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)

    def _slices(self, index: tuple[Any, ...]) -> tuple[list[slice], set[int]]:
        """Slices of all axes, and the axes that an integer drops."""
        places = [number for number, part in enumerate(index) if part is Ellipsis]
        if len(places) > 1 or len(index) - len(places) > len(self.shape):
            raise ArgumentError(
                f"{self._key}: an index must have at most {len(self.shape)} axes and one ..., found {index}"
            )
        first = places[0] if places else len(index)
        missing = len(self.shape) - (len(index) - len(places))
        parts = [*index[:first], *[slice(None)] * missing, *index[first + 1 :]]
        slices, dropped = [], set()
        for axis, (part, size) in enumerate(zip(parts, self.shape, strict=True)):
            if isinstance(part, slice) and part.step in (None, 1):
                start, stop, _ = part.indices(size)
                slices.append(slice(start, max(start, stop)))
            elif isinstance(part, int | np.integer) and not isinstance(part, bool):
                place = int(part)
                if not -size <= place < size:
                    raise IndexError(f"{self._key}: axis {axis} has {size} elements, but element {place} is wanted")
                slices.append(slice(place % size, place % size + 1))
                dropped.add(axis)
            else:
                raise ArgumentError(
                    f"{self._key}: an index must have integers and slices with steps of 1, found {part!r}"
                )
        return slices, dropped


class Checkpoint(Mapping[str, TensorReader]):
    """Mapping from the keys of a checkpoint to its tensors, as `TensorReader`s.

    `checkpoint["weight"][1:3]` reads two rows of a tensor, `checkpoint["weight"].shape` reads nothing.

    Args:
        folder: opened checkpoint.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        """Says where the checkpoint is, and what it has."""
        tensors, objects = len(self), len(self._folder.catalogue.objects)
        return f"<Checkpoint {self._folder.path}: {number_of(tensors, 'tensor')}, {number_of(objects, 'object')}>"

    def __getitem__(self, key: str) -> TensorReader:
        """Tensor with a key.

        Raises:
            KeyError: there is none.
        """
        if key not in self._folder.catalogue.tensors:
            raise KeyError(key)
        return TensorReader(self._folder, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._folder.catalogue.tensors)

    def __len__(self) -> int:
        return len(self._folder.catalogue.tensors)

    @property
    def object_keys(self) -> list[str]:
        """Unique keys of the objects."""
        return list(self._folder.catalogue.objects)

    def load_object(self, unique_key: str) -> Any:
        """Loads an object.

        Raises:
            KeyError: there is none.
            CheckpointError: it is damaged, or has classes that are not allowed.
        """
        if unique_key not in self._folder.catalogue.objects:
            raise KeyError(unique_key)
        with self._folder.naming_replacement(), BoxReader(self._folder.path, self._folder.catalogue) as reader:
            return reader.read_object(unique_key)

    def load_common(self) -> dict[str, Any]:
        """Loads the state that is not sharded.

        Raises:
            CheckpointError: it is damaged, or has classes that are not allowed.
        """
        return self._folder.load_common()


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Opens a checkpoint of Trackbed, Megatron Core or torch, to read parts of it.

    Args:
        folder: folder of the checkpoint, or its address in an object store.

    Raises:
        CheckpointError: there is none, or it is damaged.
        StoreError: the store refuses, or does not answer in time.
    """
    return Checkpoint(open_folder(any_folder(folder)))


def latest_checkpoint(folder: str | Path, *, group: Ranks = None) -> Path | str | None:
    """Collective over `group`: returns the checkpoint in a folder whose name ends with the highest number.

    Names such as `step-0000100`, `iter_0000100` and `100` have a number at their end. Other names are ignored, such as
    that of the `.partial` folder of a save that was killed, and so are folders that hold no checkpoint. One that is not
    whole is passed over with a warning; its tensors are not read. Rank 0 looks, and all ranks return the same path.

    Args:
        folder: folder of the checkpoints, which need not exist, or its address in an object store.
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.

    Returns:
        Path of the checkpoint, `folder` and its name, or the address where `folder` is one. None if there is none.

    Raises:
        CheckpointError: on every rank: the folder cannot be read, is a file, or is a checkpoint itself.
    """
    with meet("latest_checkpoint", group) as meeting:
        name = meeting.broadcast(_latest_name(any_folder(folder)).encode() if meeting.rank == 0 else b"").decode()
    if not name:
        return None
    return f"{str(folder).rstrip('/')}/{name}" if is_address(folder) else Path(folder) / name


def _latest_name(folder: AnyFolder) -> str:
    """Name of the last checkpoint of a folder; empty if there is none."""
    return _latest_in_store(folder) if isinstance(folder, StoredFolder) else _latest_in_folder(folder)


def _latest_in_store(folder: StoredFolder) -> str:
    names = [name for name in folder.folders() if _NUMBER.search(name) and not is_save_id(name)]
    for name in sorted(names, key=_number_of, reverse=True):
        one = (folder / name).opened()
        if one.save_id is None and not one.has(DCP_METADATA):
            continue
        if _is_whole(one):
            return name
    if folder.opened().save_id is not None or folder.has(DCP_METADATA):
        raise _is_one(folder)
    return ""


def _number_of(name: str) -> int:
    found = _NUMBER.search(name)
    return -1 if found is None else int(found[0])


def _is_whole(folder: AnyFolder) -> bool:
    """True if a checkpoint can be opened; the log says why one cannot."""
    try:
        open_folder(folder)
    except CheckpointError as error:
        logger.warning("%s: is passed over, because it is not whole: %s", folder, error)
        return False
    return True


def _is_one(folder: AnyFolder) -> CheckpointError:
    return CheckpointError(
        f"{folder}: must be a folder of checkpoints, but is a checkpoint itself: give the folder that it is in"
    )


def _latest_in_folder(folder: Path) -> str:
    if folder.is_file():
        raise CheckpointError(f"{folder}: must be a folder of checkpoints, but is a file")
    if not folder.is_dir():
        return ""
    found = [
        (int(number[0]), one.name)
        for one in folder.iterdir()
        if (number := _NUMBER.search(one.name)) and (one / DCP_METADATA).is_file()
    ]
    for _, name in sorted(found, reverse=True):
        if _is_whole(folder / name):
            return name
    if (folder / DCP_METADATA).is_file():
        raise _is_one(folder)
    return ""
