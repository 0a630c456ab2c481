"""Checkpoints that are hostile, or odd: each is a folder that a function makes of a whole one."""

import collections
import datetime as dt
import json
import pickle
import shutil
import struct
import sys
import warnings
import zlib
from types import ModuleType

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from trackbed.checkpoint import ShardedObject, ShardedTensor, save

VERY_LARGE = 1 << 50


def write_whole(folder):
    """Writes `trackbed`, with a side file, `megatron`, the same without it, and `torch`, which torch has saved."""
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(8.0)),
        "o": ShardedObject("o", {"a": 1}, (1,), (0,)),
        "step": 3,
    }
    save(state, folder / "trackbed")
    shutil.copytree(folder / "trackbed", folder / "megatron")
    (folder / "megatron" / "trackbed.extents").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(8.0)}, checkpoint_id=str(folder / "torch"), no_dist=True)


def metadata(change):
    """Changes `.metadata` of a checkpoint of torch."""

    def apply(folder):
        path = folder / ".metadata"
        found = pickle.loads(path.read_bytes())
        change(found)
        path.write_bytes(pickle.dumps(found))

    return "torch", apply


def box_of(shape):
    """Says that the tensor is one box of a shape."""

    def change(found):
        stored = found.state_dict_metadata["w"]
        stored.size = torch.Size(shape)
        stored.chunks = [type(stored.chunks[0])(torch.Size([0] * len(shape)), torch.Size(shape))]
        for index in list(found.storage_data):
            place = found.storage_data.pop(index)
            found.storage_data[type(index)("w", torch.Size([0] * len(shape)), 0)] = place

    return change


def place_of(**fields):
    """Changes the place of the item."""

    def change(found):
        for place in found.storage_data.values():
            vars(place).update(fields)

    return change


def renamed(key):
    def change(found):
        found.state_dict_metadata[key] = found.state_dict_metadata.pop("w")
        for index in list(found.storage_data):
            place = found.storage_data.pop(index)
            found.storage_data[type(index)(key, index.offset, index.index)] = place

    return change


def type_of(dtype):
    def change(found):
        found.state_dict_metadata["w"].properties.dtype = dtype

    return change


def common(make):
    """Another common state."""

    def apply(folder):
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(10 * limit)
        in_python = ModuleType("in_python")
        in_python.Pickler = pickle._Pickler  # goes as deep as that limit; the one in C does not, from Python 3.12 on
        try:
            torch.save(make(), folder / "common.pt", pickle_module=in_python)
        finally:
            sys.setrecursionlimit(limit)

    return "megatron", apply


def deep():
    value = 1
    for _ in range(900):
        value = {"a": value}
    return {"x": value}


def deep_key():
    value = ()
    for _ in range(2000):
        value = (value,)
    return {value: 1}


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def called(function, *arguments):
    """A common state with a call, beside a defaultdict."""
    return common(lambda: {"x": Call(function, *arguments), "y": Call(collections.defaultdict, None, {})})


def config(content):
    """Another `metadata.json`."""
    return "megatron", lambda folder: (folder / "metadata.json").write_text(content)


def side(change):
    """Changes the description in the side file, or its numbers, and makes its checksum right again."""

    def apply(folder):
        path = folder / "trackbed.extents"
        content = path.read_bytes()
        length = struct.unpack("<Q", content[16:24])[0]
        head, numbers = json.loads(content[24 : 24 + length]), bytearray(content[24 + length : -4])
        change(head, numbers)
        head = json.dumps(head).encode()
        body = content[:16] + struct.pack("<Q", len(head)) + head + numbers
        path.write_bytes(body + struct.pack("<I", zlib.crc32(body)))

    return "trackbed", apply


def number(place, value):
    """Changes one of the numbers: the columns of the tensor and the object follow each other."""

    def change(head, numbers):
        struct.pack_into("<q", numbers, 8 * place, value)

    return side(change)


def head(**fields):
    return side(lambda head, numbers: head.update(fields))


HOSTILE = {
    "a link to nothing": ("trackbed", lambda folder: (folder / "x").symlink_to("/nonexistent")),
    "no folder": ("trackbed", shutil.rmtree),
    "a file for the folder": ("trackbed", lambda folder: (shutil.rmtree(folder), folder.write_text("x"))),
    "a very large tensor": metadata(box_of([VERY_LARGE])),
    "70 axes": metadata(box_of([1] * 70)),
    "a very large item": metadata(place_of(length=VERY_LARGE)),
    "an item at a far place": metadata(place_of(offset=1 << 61)),
    "a long name": metadata(place_of(relative_path="a" * 5000)),
    "another folder": metadata(place_of(relative_path="../x")),
    "a surrogate in a key": metadata(renamed("\udc80\x1b[31m")),
    "a quantized type": metadata(type_of(torch.quint8)),
    "a type of bits": metadata(type_of(torch.bits8)),
    "another type": side(lambda head, numbers: head["tensors"][0].__setitem__(1, "int64")),
    "a quantized type in the side file": side(lambda head, numbers: head["tensors"][0].__setitem__(1, "qint32")),
    "a deep common state": common(deep),
    "a deep key": common(deep_key),
    "a surrogate in the common state": common(lambda: {"\udc80\n": 1, 5: 2}),
    "a sparse tensor": common(lambda: {"x": torch.zeros(3).to_sparse()}),
    "very many zeros": called(bytes, VERY_LARGE),
    "very many zeros in a bytearray": called(bytearray, 1 << 34),
    "bytes of a list": called(bytes, [1, 2]),
    "a factory for a value": common(lambda: {"x": int, "y": Call(collections.defaultdict, int, {})}),
    "a factory that is called": called(str, b"a"),
    "a defaultdict of a function": called(collections.defaultdict, Call, {}),
    "a defaultdict of a list": called(collections.defaultdict, None, [1]),
    "a deque of a very large length": called(collections.deque, [1], VERY_LARGE),
    "a deque of text": called(collections.deque, "text"),
    "a frozenset of text": called(frozenset, "text"),
    "a very large scalar": called(np.float64(0).__reduce__()[0], np.dtype("V1000000000")),
    "a scalar of an object": called(np.float64(0).__reduce__()[0], np.dtype("O"), [1]),
    "a scalar of few bytes": called(np.float64(0).__reduce__()[0], np.dtype("f8"), b"a"),
    "a time of odd bytes": called(dt.datetime, b"\xff" * 10),
    "a list for the common state": common(lambda: [1]),
    "a list of formats": config("[1]"),
    "another format": config('{"sharded_backend": "zarr"}'),
    "version 9": config('{"sharded_backend": "torch_dist", "sharded_backend_version": 9}'),
    "a surrogate for a format": config('{"sharded_backend": "\\udc80"}'),
    "a file number that is too large": number(0, 7),
    "a negative file number": number(0, -1),
    "a negative start": number(2, -5),
    "a negative size": number(4, -5),
    "a negative payload": number(6, -5),
    "a large payload": number(8, VERY_LARGE),
    "a checksum that is not there": number(10, 1000),
    "a negative offset": number(12, -3),
    "a negative box": number(14, -8),
    "a box beyond the tensor": number(14, VERY_LARGE),
    "a negative shape": side(lambda head, numbers: head["tensors"][0].__setitem__(2, [-8])),
    "a shape of words": side(lambda head, numbers: head["tensors"][0].__setitem__(2, ["a"])),
    "a shape of two axes": side(lambda head, numbers: head["tensors"][0].__setitem__(2, [8, 8])),
    "an endless shape": side(lambda head, numbers: head["tensors"][0].__setitem__(2, [1 << 62])),
    "a negative number of rows": side(lambda head, numbers: head["tensors"][0].__setitem__(3, -1)),
    "a key that is a number": side(lambda head, numbers: head["tensors"][0].__setitem__(0, 5)),
    "a type that is none": side(lambda head, numbers: head["tensors"][0].__setitem__(1, "nn")),
    "files of another folder": head(files=[["../x", 1, 2]], data_files=["../x"]),
    "a file that is a number": head(files=[[5, 1, 2]]),
    "data files that are numbers": head(data_files=[5]),
    "a size that is text": head(files=[["metadata.json", "x", "y"]]),
    "no files": head(files=[]),
    "objects that are numbers": head(objects=[5]),
    "a save without a name": head(save_id=[1]),
    "a surrogate in the side file": head(objects=["\ud800"]),
}
"""Kind of checkpoint, and what is done to it, by name."""
