"""Pickles of any protocol: classes that are not allowed are named, and torch's advice to allow all is not repeated."""

import argparse
import collections
import enum
import pickle
import re
import signal
import subprocess
import warnings
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trackbed.checkpoint import ShardedObject, ShardedTensor, load, save
from trackbed.checkpoint.format.allowed_classes import naming_unknown
from trackbed.checkpoint.format.safe_pickle import load_torch_item
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization


class Own:
    def __init__(self):
        self.value = 1


def pickled(value, protocol, **options):
    stream = BytesIO()
    torch.save(value, stream, pickle_protocol=protocol, **options)
    return stream.getvalue()


def refusal(content):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError) as caught:
            load_torch_item(content, "common.pt")
    assert "weights_only" not in str(caught.value).lower()
    assert "weights only" not in str(caught.value).lower()
    assert "weights" not in repr(caught.value.__cause__)
    assert "weights" not in repr(caught.value.__context__) or caught.value.__suppress_context__
    return str(caught.value)


NOT_ALLOWED = {
    "a class": (Own(), r"test_safe_pickle.Own"),
    "a class itself": (subprocess.Popen, "subprocess.Popen"),
    "a class among allowed ones": ({"a": [torch.ones(2), argparse.Namespace(x=Own())]}, "test_safe_pickle.Own"),
    "a class after strings like one": ({"os": "system", "x": ["os", "system", Own()]}, "test_safe_pickle.Own"),
    "two of one class": ([Own(), Own()], "test_safe_pickle.Own"),
    "a function": (subprocess.run, "subprocess.run"),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", NOT_ALLOWED)
@pytest.mark.parametrize("is_archive", [True, False])
def test_a_class_that_is_not_allowed_is_named_in_every_protocol(kind, protocol, is_archive):
    value, name = NOT_ALLOWED[kind]
    error = refusal(pickled(value, protocol, _use_new_zipfile_serialization=is_archive))
    short = name.rpartition(".")[2]
    assert f"has {short!r}" in error
    assert "add_safe_globals" in error
    if protocol > 2 or "subprocess" not in name:  # protocol 2 knows some modules under older names
        assert name in error


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "value", [{"a": 1}, {"t": torch.ones(2)}, argparse.Namespace(a={1, 2}), collections.OrderedDict(b=b"xx")]
)
def test_allowed_classes_of_a_later_protocol_are_refused_for_the_protocol(value, protocol):
    error = refusal(pickled(value, protocol))
    assert f"must be a pickle of protocol 3 or lower, as torch.save writes it, but is of protocol {protocol}" in error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"\x80\x04",
        b"\x80\x05.",
        b"\x80\x04\x93.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffh",
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01\x8a\x09........s.",
        b"not a pickle at all",
        b"PK\3\4 not an archive",
        bytes(range(256)) * 4,
    ],
)
def test_damaged_and_hostile_pickles_are_refused_without_advice(content):
    error = refusal(content)
    assert error.startswith("common.pt: must be")
    if b"system" in content:
        assert "'system'" in error


def test_an_archive_of_torchscript_is_refused_without_advice():
    stream = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), stream)
    refusal(stream.getvalue())


def test_a_value_that_cannot_be_loaded_again_is_refused_by_save_without_advice(tmp_path):
    with pytest.raises(CheckpointError, match=r"'Own' \(.*test_safe_pickle.Own\)") as caught:
        save({"x": Own()}, tmp_path / "checkpoint", group=SOLO)
    assert "weights_only" not in str(caught.value)


def test_a_common_state_of_protocol_4_is_named_by_its_class(tmp_path):
    save({"step": 1}, tmp_path / "checkpoint", group=SOLO)
    (tmp_path / "checkpoint" / "common.pt").write_bytes(pickled({"x": Own()}, 4))
    (tmp_path / "checkpoint" / "trackbed.extents").unlink()
    with pytest.raises(CheckpointError, match="must be made of classes that are allowed, but has 'Own'"):
        load({}, tmp_path / "checkpoint", group=SOLO)


@pytest.mark.parametrize("saves", [save, serialization.save])
def test_no_checkpoint_has_the_path_of_a_class_of_ours(saves, tmp_path):
    """So modules of Trackbed may be renamed, and checkpoints that were saved before are still loaded."""
    values = {
        "default": collections.defaultdict(int, a=1),
        "deque": collections.deque([1], 3),
        "bytes": b"1",
        "set": frozenset([1]),
        "number": np.float64(1),
        "tensor": torch.ones(2),
    }
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(3)),
        "o": ShardedObject("o", values if saves is save else 5, (1,), (0,)),
        **(values if saves is save else {}),
    }
    saves(state, tmp_path / "step", content_metadata={"version": 1})
    for file in (tmp_path / "step").iterdir():
        assert not re.search(rb"trackbed[./](?!extents)", file.read_bytes()), file.name


class Word(enum.Enum):
    YES = "yes"


class ByName(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do: by `getattr`."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def saved_by_name(value):
    stream = BytesIO()
    torch.save(value, stream, pickle_module=SimpleNamespace(__name__="pickle", Pickler=ByName))
    assert b"getattr" in stream.getvalue()
    return stream.getvalue()


def test_members_of_enums_may_be_pickled_by_name():
    assert load_torch_item(saved_by_name([signal.SIGTERM]), "x") == [signal.SIGTERM]
    with torch.serialization.safe_globals([Word]):
        assert load_torch_item(saved_by_name({"a": Word.YES}), "x") == {"a": Word.YES}
    with pytest.raises(CheckpointError, match="must be made of classes that are allowed, but has 'Word'"):
        load_torch_item(saved_by_name(Word.YES), "x")
    with naming_unknown() as names:
        found = load_torch_item(saved_by_name([Word.YES, Word.YES]), "x")
    assert names == {f"{__name__}.Word"}
    assert found[0] == found[1] != 0


def test_signals_may_be_pickled_by_name():
    stream = BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for name, content in {"data.pkl": b"\x80\x02csignal\nSIGTERM\n.", "byteorder": b"little"}.items():
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    assert load_torch_item(stream.getvalue(), "x") is signal.SIGTERM


class Attribute:
    """Pickled as an attribute of something else."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


@pytest.mark.parametrize(
    "arguments", [(signal.Signals, "mro"), (signal.Signals, "__class__"), (np.dtype("f8"), "type"), ("", "join")]
)
def test_no_other_attribute_is_read(arguments):
    stream = BytesIO()
    torch.save([Attribute(*arguments)], stream)
    with pytest.raises(CheckpointError, match="getattr must be of a member of an enum, found"):
        load_torch_item(stream.getvalue(), "x")
