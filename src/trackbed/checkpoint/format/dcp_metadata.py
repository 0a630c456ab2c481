"""`.metadata`: the pickle in which torch's distributed checkpoints describe themselves.

Only the classes that such a description needs are unpickled. Nothing else is imported or called.
"""

import io
import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from trackbed.checkpoint.format.catalogue import DTYPE_OF, Catalogue, CatalogueBuilder
from trackbed.checkpoint.values.rebuild import rebuild_enum_member
from trackbed.errors import CheckpointError

DCP_METADATA: Final = ".metadata"

_PUTS: Final = ("PUT", "BINPUT", "LONG_BINPUT")

Numbers = tuple[int, ...]


_MODULES: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "torch.distributed.checkpoint.metadata": (
        metadata,
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
    ),
    "torch.distributed.checkpoint.planner": (planner, ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    "torch.distributed.checkpoint.filesystem": (filesystem, ("_StorageInfo",)),
    "torch.serialization": (torch.serialization, ("_get_layout",)),
    "torch": (torch, ("Size",)),
}
_OLD: Final = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): metadata.Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): planner.SavePlan,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns one of the classes that are allowed."""
        source, names = _MODULES.get(module, (None, ()))
        if name in names:
            return getattr(source, name)
        if module == "torch" and name in DTYPE_OF:
            return DTYPE_OF[name]
        if (module, name) in _OLD:
            return _OLD[module, name]
        if (module, name) in (("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")):
            return _ignored_path
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enums by name
            return rebuild_enum_member
        raise CheckpointError(
            f"{DCP_METADATA}: must be made of the classes of torch's distributed checkpoints alone, but has "
            f"{name!r} of {module!r}, which is not loaded: save the checkpoint again, or do not trust it"
        )


def _check_memo(content: bytes) -> None:
    """Checks that no place in the memo is beyond those that a pickle of this size can fill: the memo grows up to it."""
    for code, argument, _ in pickletools.genops(content):
        if code.name in _PUTS and argument is not None and argument > len(content):
            raise CheckpointError(
                f"{DCP_METADATA}: must be a pickle of {len(content):,} bytes, but asks for {argument:,} objects"
            )


def _ignored_path(*parts: object) -> str:
    """Takes the place of a path, which is not used."""
    return "/".join(map(str, parts))


def decode_metadata(content: bytes) -> Catalogue:
    """Reads `.metadata`."""
    try:
        _check_memo(content)
        found = _Unpickler(io.BytesIO(content)).load()
        return _catalogue_of(found)
    except CheckpointError:
        raise
    except Exception as error:  # pickle and hostile values raise errors of any kind
        raise CheckpointError(
            f"{DCP_METADATA}: must describe a checkpoint, but cannot be read: {type(error).__name__}: {error}"
        ) from error


def _catalogue_of(described: metadata.Metadata) -> Catalogue:
    builder = CatalogueBuilder()
    boxes: dict[tuple[str, Numbers | None], Numbers] = {}
    for key, value in _of(described.state_dict_metadata, dict).items():
        if isinstance(value, metadata.TensorStorageMetadata):
            shape = _numbers(value.size)
            builder.add_tensor(_of(key, str), _of(value.properties.dtype, torch.dtype), shape)
            boxes |= {(key, offset): sizes for offset, sizes in _boxes_of(key, value, shape)}
        else:
            _of(value, metadata.BytesStorageMetadata)
            boxes[_of(key, str), None] = ()
    for index, location in _of(described.storage_data, dict).items():
        key = _of(index.fqn, str)
        is_object = index.offset is None or (key, None) in boxes  # old objects have an offset that means nothing
        offset = None if is_object else _numbers(index.offset)
        if (key, offset) not in boxes:
            raise CheckpointError(f"{DCP_METADATA}: {key}: each item must be listed once, but one at {offset} is not")
        sizes = boxes.pop((key, offset))
        if getattr(location, "transform_descriptors", None):
            transforms = location.transform_descriptors
            raise CheckpointError(
                f"{DCP_METADATA}: {key}: items must be stored plainly, but are transformed: {transforms}"
            )
        file = _file_name(_of(location.relative_path, str))
        start, num_bytes = _numbers((location.offset, location.length))
        if offset is None:
            builder.add_object(key, file=file, start=start, num_bytes=num_bytes)
        else:
            builder.add_box(key, offset, sizes, file=file, start=start, num_bytes=num_bytes)
    for (key, offset), sizes in boxes.items():
        if 0 not in sizes:
            what = "object" if offset is None else f"box of shape {sizes} at {offset}"
            raise CheckpointError(f"{DCP_METADATA}: {key}: all that is listed must be stored, but the {what} is not")
    return replace(builder.build(), paths=_paths_of(described.planner_data))


def _paths_of(planner_data: object) -> dict[str, tuple[str | int, ...]]:
    """Paths of tensors and objects in the state that was saved, as far as the planner has noted them."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        key: path
        for key, path in planner_data.items()
        if isinstance(key, str) and isinstance(path, tuple) and all(type(part) in (str, int) for part in path) and path
    }


def _boxes_of(key: str, value: metadata.TensorStorageMetadata, shape: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields first element and shape of each box of a tensor."""
    for chunk in _of(value.chunks, list):
        offset, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
        fits = len(offset) == len(sizes) == len(shape)
        if not fits or any(start + size > end for start, size, end in zip(offset, sizes, shape, strict=True)):
            raise CheckpointError(
                f"{DCP_METADATA}: {key}: each box must lie within {shape}, but one of shape {sizes} is at {offset}"
            )
        yield offset, sizes


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(
            f"{DCP_METADATA}: a field must be of type {kind.__name__}, but is of {type(value).__name__}"
        )
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    """Checks that all are counts."""
    found = tuple(values)
    if any(type(value) is not int or not 0 <= value < 1 << 62 for value in found):
        raise CheckpointError(f"{DCP_METADATA}: sizes and places must be whole numbers from 0, found {str(found)[:80]}")
    return found


def _file_name(name: str) -> str:
    """Checks that a file lies in the folder of the checkpoint."""
    if not name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise CheckpointError(f"{DCP_METADATA}: files must lie in the folder of the checkpoint, but one is {name!r}")
    return name


def encode_metadata(catalogue: Catalogue) -> bytes:
    """Writes `.metadata` for a catalogue, for torch and Megatron Core."""
    return pickle.dumps(metadata_of(catalogue), protocol=4)


def metadata_of(catalogue: Catalogue) -> metadata.Metadata:
    """Describes a catalogue as torch does."""
    state: dict[str, Any] = {}
    storage: dict[metadata.MetadataIndex, Any] = {}
    rows = list(
        zip(*(column.tolist() for column in (catalogue.file, catalogue.start, catalogue.num_bytes)), strict=True)
    )

    def add(index: metadata.MetadataIndex, row: int) -> None:
        file, start, num_bytes = rows[row]
        storage[index] = filesystem._StorageInfo(catalogue.files[file], start, num_bytes)

    for key, tensor in catalogue.tensors.items():
        chunks = []
        for number, row in enumerate(tensor.rows):
            offset, sizes = catalogue.box(row, len(tensor.shape))
            chunks.append(metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
            add(metadata.MetadataIndex(key, offset, number), row)
        properties = metadata.TensorProperties(dtype=tensor.dtype)
        state[key] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for key, row in catalogue.objects.items():
        state[key] = metadata.BytesStorageMetadata()
        add(metadata.MetadataIndex(key), row)
    return metadata.Metadata(state, None, storage, metadata.StorageMeta(), "1.0.0")
