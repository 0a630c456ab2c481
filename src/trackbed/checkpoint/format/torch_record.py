"""Record of one tensor, as `torch.save` writes it: a zip archive whose payload is not compressed.

    local header of data/0, padding | payload | descriptor, the small members, central directory

The payload comes first, so that it can begin at a chosen place of the file, and its CRC-32 need not be known before it
has been copied: the descriptor and the central directory, which readers use, follow it.
"""

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any, Final

import torch

from trackbed.files.checksum import crc32

_FOLDER: Final = "archive"
_PAYLOAD: Final = f"{_FOLDER}/data/0"
_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<4sHHHHIIH")
_END_64: Final = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_64: Final = struct.Struct("<4sIQI")
_CENTRAL_CRC: Final = 16
"""Place of the checksum in an entry of the central directory."""
_VERSION: Final = 45
_DESCRIPTOR_FOLLOWS: Final = 0x0808  # sizes and CRC-32 follow the data; names are UTF-8
_HEADER_BYTES: Final = 64
"""Place of the payload in a small record: a multiple of the alignment that torch uses."""
_MAX_32: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class TorchRecord:
    """Bytes around the payload of a tensor."""

    head: bytes
    """Bytes before the payload."""
    payload_bytes: int
    tail: Callable[[int], bytes]
    """Returns the bytes after the payload for its CRC-32."""
    num_bytes: int
    """Size of the whole record."""


@lru_cache(maxsize=4096)
def tensor_record(dtype: torch.dtype, shape: tuple[int, ...], *, payload_start: int = _HEADER_BYTES) -> TorchRecord:
    """Makes the record of a contiguous tensor.

    Args:
        dtype: type of the elements.
        shape: shape of the tensor.
        payload_start: place of the payload in the record, from 64 to 65,535.
    """
    count = 1
    for size in shape:
        count *= size
    num_bytes = count * dtype.itemsize
    name = _PAYLOAD.encode()
    padding = payload_start - _LOCAL.size - len(name)
    # An extra field of its own kind, which readers skip, fills the space; torch's is called "FB" too.
    extra = struct.pack("<2sH", b"FB", padding - 4) + bytes(padding - 4)
    head = _LOCAL.pack(b"PK\3\4", _VERSION, _DESCRIPTOR_FOLLOWS, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra
    members = (
        (f"{_FOLDER}/data.pkl", _description(dtype, shape, count)),
        (f"{_FOLDER}/byteorder", b"little"),
        (f"{_FOLDER}/version", b"3\n"),
    )
    middle, directory = _members(members, payload_start + num_bytes + _descriptor_bytes(num_bytes))

    start = payload_start + num_bytes + _descriptor_bytes(num_bytes) + len(middle)
    entry = _central(_PAYLOAD, 0, num_bytes, 0, _DESCRIPTOR_FOLLOWS)
    end = _end(len(members) + 1, len(entry) + len(directory), start)
    # The checksum of the payload, which is not known yet, is in the descriptor and in the entry.
    first, last = _descriptor(0, num_bytes), middle + entry
    place = len(middle) + _CENTRAL_CRC
    parts = first[:4], first[8:] + last[:place], last[place + 4 :] + directory + end

    def tail(crc: int) -> bytes:
        return crc.to_bytes(4, "little").join(parts)

    return TorchRecord(head, num_bytes, tail, len(head) + num_bytes + len(tail(0)))


class _Storage:
    """Stands for the payload in a pickle."""

    def __init__(self, kind: type, count: int) -> None:
        self.id = ("storage", kind, "0", "cpu", count)


class _Tensor:
    """Pickles as a tensor."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
        self._dtype = dtype
        self._shape = shape
        self._count = count

    def __reduce__(self) -> tuple[Any, ...]:
        stride, strides = 1, []
        for size in reversed(self._shape):
            strides.append(stride)
            stride *= max(size, 1)
        layout: tuple[Any, ...] = (0, self._shape, tuple(reversed(strides)), False, OrderedDict())
        kind = _storage_type(self._dtype)
        if kind is None:  # newer types have no class: they name themselves, and their storage counts bytes
            storage = _Storage(torch.UntypedStorage, self._count * self._dtype.itemsize)
            return torch._utils._rebuild_tensor_v3, (storage, *layout, self._dtype)
        return torch._utils._rebuild_tensor_v2, (_Storage(kind, self._count), *layout)


class _PayloadPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        """Names the payload."""
        return value.id if isinstance(value, _Storage) else None


@lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> bytes:
    """The member data.pkl."""
    stream = BytesIO()
    _PayloadPickler(stream, protocol=2).dump(_Tensor(dtype, shape, count))
    return stream.getvalue()


@lru_cache
def _storage_type(dtype: torch.dtype) -> type | None:
    """Class that names a type in a pickle; None for types without one."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name) if name else None


def _members(members: tuple[tuple[str, bytes], ...], start: int) -> tuple[bytes, bytes]:
    """Small members from a place on, and their entries in the central directory."""
    content, entries = b"", b""
    for name, data in members:
        crc, place = crc32(data), start + len(content)
        path = name.encode()
        fields = (_VERSION, 0x0800, 0, 0, 0, crc, len(data), len(data), len(path), 0)
        content += _LOCAL.pack(b"PK\3\4", *fields) + path + data
        entries += _central(name, crc, len(data), place, 0x0800)
    return content, entries


def _central(name: str, crc: int, size: int, place: int, flags: int) -> bytes:
    path = name.encode()
    large = [value for value in (size, size, place) if value >= _MAX_32]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    sizes, start = min(size, _MAX_32), min(place, _MAX_32)
    fields = (_VERSION, _VERSION, flags, 0, 0, 0, crc, sizes, sizes, len(path), len(extra), 0, 0, 0, 0, start)
    return _CENTRAL.pack(b"PK\1\2", *fields) + path + extra


def _descriptor_bytes(size: int) -> int:
    return 24 if size >= _MAX_32 else 16


def _descriptor(crc: int, size: int) -> bytes:
    return struct.pack("<4sIQQ" if size >= _MAX_32 else "<4sIII", b"PK\7\10", crc, size, size)


def _end(count: int, size: int, start: int) -> bytes:
    """End of the central directory."""
    end = _END.pack(b"PK\5\6", 0, 0, count, count, size, min(start, _MAX_32), 0)
    if start < _MAX_32:
        return end
    end_64 = _END_64.pack(b"PK\6\6", _END_64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, start)
    return end_64 + _LOCATOR_64.pack(b"PK\6\7", 0, start + size, 1) + end
