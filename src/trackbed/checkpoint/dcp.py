"""Storage for `torch.distributed.checkpoint`: its planners, Trackbed's files, checksums and commit.

    dcp.save(state, storage_writer=StorageWriter("checkpoints/step-0000100"))
    dcp.load(state, storage_reader=StorageReader("checkpoints/step-0000100"))

A checkpoint appears whole or not at all, and is read by `trackbed.load`, by `dcp.load` without a reader of its own, and
by `trackbed ckpt`. The reader also reads checkpoints that `trackbed.save` has written, with their plain values.

Contract: https://pytorch.org/docs/2.13/distributed.checkpoint.html
"""

import contextlib
import io
import logging
import os
import pickle
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.distributed_c10d import _get_default_store
from torch.futures import Future

from trackbed.checkpoint.background.staging import SlabPool, staged
from trackbed.checkpoint.begin_save import AnySave
from trackbed.checkpoint.commit import is_checkpoint, target_folder
from trackbed.checkpoint.folder import CheckpointFolder, any_folder, open_folder
from trackbed.checkpoint.format.catalogue import DTYPE_OF, CatalogueBuilder, require_text
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA, metadata_of
from trackbed.checkpoint.format.extents import SIDE_NAME, Described, FileChecksum, SideFile
from trackbed.checkpoint.io.boxes import BoxReader, BoxToFill, fill_boxes
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.file_writer import WrittenItem
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.local_save import LocalSave
from trackbed.checkpoint.stored_save import StoredSave, begin_stored_save
from trackbed.errors import CheckpointError, TrackbedError
from trackbed.files.checksum import crc32
from trackbed.files.publish_folder import make_partial_folder

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]
_DTYPES: Final = frozenset(DTYPE_OF.values())
_STORE_KEY: Final = "trackbed/dcp/"
_NOT_STAGED: Final = "trackbed: not staged"
"""Key of an error in a state that could not be copied."""
_slabs: Final = SlabPool()
"""Memory for the copies of `dcp.async_save`."""


@dataclass(frozen=True, slots=True)
class WrittenPlace:
    """Place of an item in the file of a rank, which the ranks send to the first one."""

    file: str
    file_bytes: int
    file_crc: int
    item: WrittenItem


class _Save:
    """One save, which all runs on one thread."""

    def __init__(self, folder: AnyFolder | None = None) -> None:
        self.folder = folder
        self.rank = 0
        self.unfinished: AnySave | None = None
        self._remove: Any = None

    def begin(self, unfinished: AnySave) -> None:
        """Notes what has been begun, which is removed with this object."""
        self.unfinished = unfinished
        self._remove = weakref.finalize(self, _remove_own, unfinished, os.getpid())

    def commit(self) -> None:
        """Notes that it is the checkpoint."""
        self._remove.detach()
        self.unfinished = None

    def forget(self) -> None:
        """Removes what is left of a save that failed."""
        if self._remove is not None:
            self._remove()
        self.unfinished = None


def _remove_own(unfinished: AnySave, process: int) -> None:
    """Removes what is left of a save, unless this process was forked from the one that writes it."""
    if os.getpid() == process:
        unfinished.give_up()


class _OfFolder:
    """What a writer and a reader have in common."""

    def __init__(self, folder: Folder | None) -> None:
        super().__init__()
        self._folder = None if folder is None else any_folder(os.fspath(folder))

    @property
    def checkpoint_id(self) -> Path | str | None:
        """Folder of the checkpoint."""
        return _name_of(self._folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        """True for a path, and for an address of an object store."""
        try:
            any_folder(os.fspath(checkpoint_id))
        except (TrackbedError, TypeError):
            return False
        return True


class StorageWriter(_OfFolder, storage.StorageWriter):
    """Writes what the planners of `dcp.save` and `dcp.async_save` say. May be pickled before it is used.

    Args:
        folder: folder of the checkpoint, of which an earlier one is replaced. None if `dcp.save` gets a
            `checkpoint_id`.
        direct: True to write past the page cache where the file system allows it.

    Raises:
        ArgumentError: the folder is no path, and no address of an object store.
    """

    def __init__(self, folder: Folder | None = None, *, direct: bool = True) -> None:
        super().__init__(folder)
        self._direct = direct
        self._saves = threading.local()
        """The save of each thread: several of `dcp.async_save` may be in flight."""
        self._not_staged = ""
        """Error of a state that could not be copied."""

    @property
    def checkpoint_id(self) -> Path | str | None:
        """Folder of the checkpoint."""
        return _name_of(self._save.folder)

    @property
    def _save(self) -> _Save:
        """Save of this thread."""
        if not hasattr(self._saves, "own"):
            self._saves.own = _Save(self._folder)
        found: _Save = self._saves.own
        return found

    _synchronize_after_execute = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """True: the copy is complete when `stage` returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies a state for `dcp.async_save`, which calls it, into memory that later saves use again.

        An error is raised in the save, where all ranks hear of it.
        """
        try:
            return staged(state_dict, _slabs)
        except Exception as error:
            logger.debug("the state must be copied, but cannot be", exc_info=True)
            self._not_staged = f"the state must be copied, but: {type(error).__name__}: {error}"
            return {_NOT_STAGED: None}

    def synchronize_staging(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing: the memory is for the next save of any writer."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The arguments alone: a save belongs to one process."""
        return partial(type(self), direct=self._direct), (_name_of(self._folder),)

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        """Begins a save, into another folder if one is given."""
        if checkpoint_id is not None:
            self._folder = any_folder(os.fspath(checkpoint_id))
        self._save.forget()
        self._saves.own = _Save(self._folder)

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        """Checks the folder.

        Raises:
            CheckpointError: there is none.
            ArgumentError: it cannot become a checkpoint.
        """
        save = self._save
        if save.folder is None:
            raise CheckpointError("StorageWriter: must have a folder: give it one, or checkpoint_id to dcp.save")
        if kwargs.get("use_collectives") is False:
            raise CheckpointError("StorageWriter: use_collectives must be True, since rank 0 commits for all ranks")
        if isinstance(save.folder, Path):
            save.folder = target_folder(save.folder)
        save.rank = kwargs.get("rank", dist.get_rank() if dist.is_initialized() else 0)

    def prepare_local_plan(self, plan: planner.SavePlan) -> planner.SavePlan:
        """Checks that all items can be written, and returns the plan as it is.

        Raises:
            CheckpointError: a tensor is of a type that no reader takes, or the state could not be copied.
        """
        for item in plan.items:
            if item.index.fqn == _NOT_STAGED:
                raise CheckpointError(self._not_staged)
            require_text(item.index.fqn)
            if item.tensor_data is not None and item.tensor_data.properties.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{item.index.fqn}: must be of a type that can be loaded, but is of "
                    f"{item.tensor_data.properties.dtype}"
                )
        return plan

    def prepare_global_plan(self, plans: list[planner.SavePlan]) -> list[planner.SavePlan]:
        """Begins the save, and tells the other ranks where its files are to lie."""
        final, save_id = self._target(), uuid.uuid4().hex
        if isinstance(final, Path):
            final.parent.mkdir(parents=True, exist_ok=True)
            self._save.begin(LocalSave(make_partial_folder(final, may_replace=is_checkpoint), final, save_id))
        else:
            self._save.begin(begin_stored_save(final, save_id))
        place = str(self._save.unfinished)
        if dist.is_initialized():
            # Planners may keep plans of an earlier save, with the folder of that one: the store has the newest.
            _get_default_store().set(_key_of(final), place)
        return [replace(plan, storage_data=place) for plan in plans]

    def write_data(self, plan: planner.SavePlan, planner: planner.SavePlanner) -> Future[list[storage.WriteResult]]:
        """Writes the items of this rank. Returns a future that is done.

        Raises:
            CheckpointError: this rank does not see the folder.
            OSError: the file cannot be written.
            StoreError: a store refuses, or does not answer in time.
        """
        unfinished = self._unfinished_of(plan)
        if isinstance(unfinished, LocalSave) and not unfinished.partial.is_dir():
            raise CheckpointError(
                f"{unfinished}: must be a folder on a file system that all ranks share, but this rank does not see it"
            )
        items = list(plan.items)
        results = []
        if items:
            target = unfinished.target(self._save.rank, 0, cuts=False)
            written = target.write(_values(items, planner), direct=self._direct)
            results = [
                storage.WriteResult(
                    item.index, found.num_bytes, WrittenPlace(name, stored.num_bytes, stored.crc, found)
                )
                for item, (name, stored, found) in zip(items, written.unpacked(), strict=True)
            ]
        future: Future[list[storage.WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: metadata.Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Writes `.metadata` and the side file, and gives the folder its name.

        Raises:
            CheckpointError: something that is described was not written.
            OSError: a file cannot be written or renamed.
        """
        unfinished = self._save.unfinished
        if unfinished is None:
            raise CheckpointError("StorageWriter: finish must be called where prepare_global_plan was")
        found = described_by(unfinished.save_id, metadata, [one for of_rank in results for one in of_rank])
        if isinstance(unfinished, LocalSave):
            _check_written(unfinished.partial, found.files.keys() - found.contents.keys(), found.files)
        unfinished.commit(found)
        self._save.commit()

    def _unfinished_of(self, plan: planner.SavePlan) -> AnySave:
        """The unfinished save of the first rank."""
        if self._save.unfinished is not None:
            return self._save.unfinished
        final = self._target()
        key = _key_of(final)
        if dist.is_initialized() and _get_default_store().check([key]):  # it is set before any rank gets here
            return _unfinished_at(_get_default_store().get(key).decode(), final)
        if isinstance(plan.storage_data, str) and (isinstance(final, StoredFolder) or Path(plan.storage_data).is_dir()):
            return _unfinished_at(plan.storage_data, final)
        raise CheckpointError(f"{final}: must be the same folder on all ranks, but the first rank saves to another one")

    def _target(self) -> AnyFolder:
        if self._save.folder is None:
            raise CheckpointError("StorageWriter: must have a folder")
        return self._save.folder


def _name_of(folder: AnyFolder | None) -> Path | str | None:
    """Path or address of a folder."""
    return str(folder) if isinstance(folder, StoredFolder) else folder


def _unfinished_at(place: str, final: AnyFolder) -> AnySave:
    """The unfinished save of another rank."""
    if isinstance(final, StoredFolder):
        return StoredSave(final, place.rpartition("/")[2])
    return LocalSave(Path(place), final, "")


def _key_of(folder: AnyFolder) -> str:
    """Key of the store under which ranks find the unfinished save of the first one."""
    return f"{_STORE_KEY}{os.path.realpath(folder) if isinstance(folder, Path) else folder}"


def _check_written(folder: Path, names: Iterable[str], files: Mapping[str, FileChecksum]) -> None:
    """Checks that the files of all ranks are in a folder."""
    for name in names:
        if not (folder / name).is_file() or (folder / name).stat().st_size != files[name].num_bytes:
            raise CheckpointError(
                f"{folder / name}: must have been written by a rank, but is not there: did another job save to the "
                "same folder?"
            )


def _values(items: Sequence[planner.WriteItem], source: planner.SavePlanner) -> Iterator[torch.Tensor | bytes]:
    """Yields tensors, and bytes of objects, one at a time: a planner may copy them."""
    for item in items:
        value = source.resolve_data(item)
        yield value.detach() if isinstance(value, torch.Tensor) else bytes(value.getbuffer())


def described_by(save_id: str, described: metadata.Metadata, results: Iterable[storage.WriteResult]) -> Described:
    """`.metadata` as torch has it, and the side file with checksums.

    Args:
        save_id: id of the save.
        described: what the planner says of the checkpoint.
        results: results of all ranks.

    Raises:
        CheckpointError: something that is described was not written.
    """
    builder = CatalogueBuilder()
    boxes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for key, value in described.state_dict_metadata.items():
        if isinstance(value, metadata.TensorStorageMetadata):
            builder.add_tensor(key, value.properties.dtype, tuple(value.size))
            boxes |= {(key, tuple(chunk.offsets)): tuple(chunk.sizes) for chunk in value.chunks}
    files: dict[str, FileChecksum] = {}
    places: dict[metadata.MetadataIndex, Any] = {}
    for result in results:
        place: WrittenPlace = result.storage_data
        files[place.file] = FileChecksum(place.file_bytes, place.file_crc)
        key, offset, item = result.index.fqn, result.index.offset, place.item
        places[result.index] = filesystem._StorageInfo(place.file, item.start, item.num_bytes)
        if offset is None:
            builder.add_object(key, file=place.file, start=item.start, num_bytes=item.num_bytes, sums=item.sums)
            continue
        size = boxes.pop((key, tuple(offset)), None)
        if size is None:
            raise CheckpointError(f"{key}: each box must be written once, and be described, but one at {offset} is not")
        builder.add_box(
            key,
            tuple(offset),
            size,
            file=place.file,
            start=item.start,
            num_bytes=item.num_bytes,
            payload_start=item.payload_start,
            payload_bytes=item.payload_bytes,
            sums=item.sums,
        )
    for key, first in boxes:
        raise CheckpointError(f"{key}: all that is described must be written, but the box at {first} is not")
    text = pickle.dumps(replace(described, storage_data=places), protocol=4)
    files[DCP_METADATA] = FileChecksum(len(text), crc32(text))
    return Described({DCP_METADATA: text, SIDE_NAME: SideFile(save_id, files, builder.build()).encode()}, files)


class StorageReader(_OfFolder, storage.StorageReader):
    """Reads checkpoints of Trackbed, torch and Megatron Core for `dcp.load`, with the checksums that they have.

    Args:
        folder: folder of the checkpoint. None if `dcp.load` gets a `checkpoint_id`.

    Raises:
        ArgumentError: the folder is no path, and no address of an object store.
    """

    def __init__(self, folder: Folder | None = None) -> None:
        super().__init__(folder)
        self._opened: CheckpointFolder | None = None
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        """Begins a load, from another folder if one is given."""
        if checkpoint_id is not None:
            self._folder = any_folder(os.fspath(checkpoint_id))
        self._opened = None
        self._values = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Describes the checkpoint. Plain values are objects, nested as the planner of torch flattens them.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        self.reset()  # torch calls this first in each load, and `reset` only if it has a `checkpoint_id`
        opened = self._open()
        catalogue = opened.catalogue
        found = metadata_of(catalogue)
        paths: dict[str, Any] = dict(catalogue.paths)
        if not opened.is_plain:
            self._values, more = _flattened(opened.load_common(catalogue.tensors.__contains__))
            paths |= more
            for key, value in self._values.items():
                found.state_dict_metadata[key] = _described(value)
                found.storage_data[metadata.MetadataIndex(key, None)] = None
        return replace(found, planner_data=paths)

    def set_up_storage_reader(self, metadata: metadata.Metadata, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: planner.LoadPlan) -> planner.LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Future[None]:
        """Fills the tensors and objects that a plan asks for. Returns a future that is done.

        Raises:
            CheckpointError: a file is damaged, or has classes that are not allowed.
        """
        opened = self._open()
        places: list[BoxToFill] = []
        filled = []
        with torch.no_grad(), opened.naming_replacement(), BoxReader(opened.path, opened.catalogue) as reader:
            keys = [item.storage_index.fqn for item in plan.items if item.type.name == "BYTE_IO"]
            reader.expect(key for key in keys if key not in self._values)
            for item in plan.items:
                key = item.storage_index.fqn
                if item.type.name == "BYTE_IO":
                    value = self._values[key] if key in self._values else reader.read_object(key)
                    planner.load_bytes(item, _pickled(value))
                    continue
                target = planner.resolve_tensor(item).detach()
                offset = item.storage_index.offset or (0,) * target.ndim
                first = tuple(at + more for at, more in zip(offset, item.storage_offsets, strict=True))
                if key in self._values:
                    region = tuple(slice(low, low + size) for low, size in zip(first, target.shape, strict=True))
                    target.copy_(self._values[key][region])
                else:
                    places.append(BoxToFill(key, target, first))
                filled.append((item, target))
            fill_boxes(places, opened.path, opened.catalogue, lambda: None)
        for item, target in filled:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self) -> CheckpointFolder:
        if self._folder is None:
            raise CheckpointError("StorageReader: must have a folder: give it one, or checkpoint_id to dcp.load")
        if self._opened is None:
            self._opened = open_folder(self._folder)
        return self._opened


def _flattened(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain values by key, and the path of each, as torch flattens them. Values whose keys collide are left out."""
    try:
        return flatten_state_dict(values)
    except ValueError as error:
        logger.warning("plain values are left out whose keys are not unique when joined by dots: %s", error)
    found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for key, value in values.items():
        with contextlib.suppress(ValueError):
            for part, more in zip(found, flatten_state_dict({key: value}), strict=True):
                part.update({name: one for name, one in more.items() if name not in part})
    return found


def _described(value: Any) -> Any:
    """Description of a value as DCP has it: a tensor in one piece, or an object."""
    if not isinstance(value, torch.Tensor):
        return metadata.BytesStorageMetadata()
    properties = metadata.TensorProperties(dtype=value.dtype)
    whole = metadata.ChunkStorageMetadata(torch.Size((0,) * value.ndim), value.size())
    return metadata.TensorStorageMetadata(properties, value.size(), [whole])


def _pickled(value: Any) -> io.BytesIO:
    """A value as `torch.save` writes it, which DCP's planners read."""
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content
