"""Files and folders of safetensors, as Hugging Face's libraries write them.

    length of the header (8 bytes) | header in JSON | elements of all tensors, row-major, without gaps

Format: https://huggingface.co/docs/safetensors. A folder has `model.safetensors`, or several files and
`model.safetensors.index.json` with the file of each tensor.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from trackbed.checkpoint.format.catalogue import Catalogue, CatalogueBuilder, is_text
from trackbed.errors import CheckpointError, FormatError
from trackbed.files.regular import open_regular, read_regular

INDEX_NAME: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"
METADATA: Final = "__metadata__"
_HEAD_BYTES: Final = 8
_MOST_HEADER_BYTES: Final = 100_000_000
_ALIGNMENT: Final = 8
_MOST_AXES: Final = 64
NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in headers."""
_DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}


class TensorPlace(NamedTuple):
    """Tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte behind the header."""
    stop: int


def encode_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file.

    Args:
        tensors: type and shape of each tensor, in the order of their elements in the file.
        metadata: further texts.

    Raises:
        CheckpointError: a type has no name in this format.
    """
    described: dict[str, Any] = {METADATA: dict(metadata)}
    start = 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in NAMES:
            raise CheckpointError(f"{key}: must be of a type that safetensors has, but is of {dtype}")
        stop = start + prod(shape) * dtype.itemsize
        described[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_HEAD_BYTES, "little") + text


def read_header(path: Path) -> tuple[dict[str, TensorPlace], int]:
    """Reads the header of a file, and checks it as the library `safetensors` does.

    Returns:
        Tensors by name, and the first byte of their elements in the file.

    Raises:
        CheckpointError: it is damaged, or has types that are not known here.
    """
    name = path.name
    try:
        descriptor, size = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            length = int.from_bytes(file.read(_HEAD_BYTES), "little")
            if size < _HEAD_BYTES or not 0 < length <= min(_MOST_HEADER_BYTES, size - _HEAD_BYTES):
                most = min(_MOST_HEADER_BYTES, max(0, size - _HEAD_BYTES))
                raise CheckpointError(f"{name}: the header must have 1 to {most:,} bytes, but has {length:,}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{name}: must be a file of safetensors, but cannot be read: {error.strerror}") from error
    except FormatError as error:
        raise CheckpointError(str(error)) from error
    try:
        found = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: the header must be JSON with each key once, but is not: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name}: the header must be a JSON object, but is of {type(found).__name__}")
    tensors = {key: _place_of(name, key, entry) for key, entry in found.items() if key != METADATA}
    _check_ranges(name, tensors, size - _HEAD_BYTES - length)
    return tensors, _HEAD_BYTES + length


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} is there twice")
    return found


def _place_of(name: str, key: str, entry: Any) -> TensorPlace:
    """A tensor of the header."""
    if not is_text(key):
        raise CheckpointError(f"{name}: keys must be text, found {key!r}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{name}: {key} must have dtype, shape and data_offsets, found {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{name}: {key} must be of a type that is known here, but is of {dtype!r}")
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [-1]
    if len(numbers) != len(shape) + 2 or any(type(one) is not int or not 0 <= one < 1 << 62 for one in numbers):
        raise CheckpointError(
            f"{name}: {key} must have whole numbers from 0 as sizes and offsets, found {str(entry)[:80]}"
        )
    place = TensorPlace(_DTYPES[dtype], tuple(shape), *offsets)
    if len(shape) > _MOST_AXES or prod(max(1, size) for size in shape) >= 1 << 59:
        raise CheckpointError(f"{name}: {key} must have a shape that torch can have, found {str(shape)[:80]}")
    num_bytes = prod(place.shape) * place.dtype.itemsize
    if place.stop - place.start != num_bytes:
        raise CheckpointError(
            f"{name}: {key} must have {num_bytes:,} bytes, as its shape {place.shape} says, but has "
            f"{place.stop - place.start:,}"
        )
    return place


def _check_ranges(name: str, tensors: Mapping[str, TensorPlace], num_bytes: int) -> None:
    """Checks that the elements of tensors follow each other, from the first byte to the last."""
    ordered = sorted(tensors.items(), key=lambda one: (one[1].start, one[1].stop))
    ends = [("the beginning", 0), *((key, place.stop) for key, place in ordered)]
    for (before, stop), (key, place) in zip(ends, ordered, strict=False):
        if place.start != stop:
            raise CheckpointError(
                f"{name}: {key} must begin at byte {stop:,}, where {before} ends, but begins at {place.start:,}"
            )
    if ends[-1][1] != num_bytes:
        raise CheckpointError(
            f"{name}: the tensors must have {num_bytes:,} bytes, as the file, but have {ends[-1][1]:,}"
        )


def has_files(folder: Path) -> bool:
    """True for a folder with files of safetensors."""
    return (folder / INDEX_NAME).exists() or any(folder.glob(f"*{SUFFIX}"))


def read_folder(folder: Path) -> Iterator[tuple[str, dict[str, TensorPlace], int]]:
    """Yields the name of each file of safetensors in a folder, and the result of `read_header`.

    Raises:
        CheckpointError: a file or the index is damaged, two files have one tensor, or the index says otherwise.
    """
    file_of = _read_index(folder)
    names = sorted(path.name for path in folder.glob(f"*{SUFFIX}")) if file_of is None else sorted({*file_of.values()})
    found: dict[str, str] = {}
    for name in names:
        tensors, first = read_header(folder / name)
        for key in tensors:
            if key in found:
                raise CheckpointError(f"{key}: must be in one file, but is in {found[key]} and {name}")
            found[key] = name
        yield name, tensors, first
    if file_of is not None and file_of != found:
        key = min(key for key in {*file_of, *found} if file_of.get(key) != found.get(key))
        raise CheckpointError(
            f"{INDEX_NAME}: must say where each tensor is, but says {file_of.get(key)} for {key}, which is in "
            f"{found.get(key, 'none of its files')}"
        )


def _read_index(folder: Path) -> dict[str, str] | None:
    """File of each tensor, as the index of a folder says; None if it has none."""
    index = folder / INDEX_NAME
    if not index.exists():
        return None
    try:
        found: dict[str, str] = dict(json.loads(read_regular(index).decode())["weight_map"].items())
    except FormatError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{INDEX_NAME}: must have a weight_map in JSON, but has none: {error!r}") from error
    if not found:
        raise CheckpointError(f"{INDEX_NAME}: must say where tensors are, but its weight_map is empty")
    for name in found.values():
        if not isinstance(name, str) or not name.endswith(SUFFIX) or Path(name).name != name or not is_text(name):
            raise CheckpointError(f"{INDEX_NAME}: must name files of this folder that end in {SUFFIX}, found {name!r}")
    return found


def catalogue_of(folder: Path) -> Catalogue:
    """Contents of a folder of safetensors; see `read_folder`."""
    builder = CatalogueBuilder()
    for name, tensors, first in read_folder(folder):
        for key, place in tensors.items():
            num_bytes = place.stop - place.start
            builder.add_tensor(key, place.dtype, place.shape)
            zeros = (0,) * len(place.shape)
            builder.add_box(
                key,
                zeros,
                place.shape,
                file=name,
                start=first + place.start,
                num_bytes=num_bytes,
                payload_start=first + place.start,
                payload_bytes=num_bytes,
            )
    return builder.build()
