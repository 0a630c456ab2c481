"""Descriptions as other releases of Python pickle them."""

import enum
import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from trackbed.checkpoint.format.dcp_metadata import decode_metadata
from trackbed.errors import CheckpointError


class Call:
    """Pickled as the call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


class ByName(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do: by `getattr`."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def description(**entries):
    """A description of one tensor without elements, and of further entries."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([0]), [chunk])
    return Metadata({"w": tensor, **entries}, None, {})


def pickled(value, kind=pickle.Pickler):
    stream = io.BytesIO()
    kind(stream).dump(value)
    return stream.getvalue()


def test_members_of_enums_may_be_pickled_by_name():
    content = pickled(description(), ByName)
    assert b"getattr" in content
    assert decode_metadata(content).tensors.keys() == {"w"}


@pytest.mark.parametrize(
    "call",
    [
        Call(getattr, WriteItemType, "__class__"),
        Call(getattr, WriteItemType, "mro"),
        Call(getattr, torch.Size, "mro"),
        Call(getattr, MetadataIndex("w"), "fqn"),
        Call(getattr, WriteItemType, 5),
    ],
)
def test_nothing_else_is_taken_by_name(call):
    with pytest.raises(CheckpointError, match=r"getattr must be of a member of an enum, found"):
        decode_metadata(pickled(description(x=call)))
