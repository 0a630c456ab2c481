"""What the list of allowed classes has besides torch's can hold data, and nothing else."""

import collections
import pickle
import re
import resource
import signal
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.processes.forked import run_in_fork
from trackbed.checkpoint.format.allowed_classes import _DATA, _OF_DEFAULTDICTS, allowing
from trackbed.checkpoint.format.safe_pickle import load_torch_item
from trackbed.checkpoint.values.rebuild import FactoryStandIn
from trackbed.errors import CheckpointError


def call(name, *arguments):
    """Pickle of a call, of arguments that are pickles without their ends."""
    module, _, short = name.rpartition(".")
    return b"c" + f"{module}\n{short}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def text(value):
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def name(full):
    module, _, short = full.rpartition(".")
    return b"c" + f"{module}\n{short}\n".encode()


def small(value):
    """Pickle of a value, without its protocol and its end."""
    return pickle.dumps(value, 2)[2:-1]


def dtype(kind):
    return call("numpy.dtype", text(kind), b"\x89", b"\x88")


def scalar(*arguments):
    return call("numpy.core.multiarray.scalar", *arguments)


def defaultdict(*arguments):
    return call("collections.defaultdict", *arguments)


FACTORY = name("builtins.int")
NONE = b"N"

HOSTILE = {
    "many zeros": call("builtins.bytes", b"J\xff\xff\xff\x7f"),
    "bytes of a list": call("builtins.bytes", b"](K\x01e"),
    "bytes of text": call("builtins.bytes", text("a"), text("ascii")),
    "many zeros under an old name": call("__builtin__.bytes", b"J\xff\xff\xff\x7f"),
    "many zeros in a bytearray": call("builtins.bytearray", b"J\xff\xff\xff\x7f"),
    "a bytearray of a list": call("builtins.bytearray", b"](K\x01e"),
    "a bytearray of a bytearray": call("builtins.bytearray", call("builtins.bytearray")),
    "a factory that is called": call("builtins.str", b"K\x01"),
    "a list of text": call("builtins.list", text("abc")),
    "a number of text": call("builtins.int", text("9" * 100)),
    "a dictionary of pairs": call("builtins.dict", b"]"),
    "a factory in the place of a value": b"(" + name("builtins.int") + b"t",
    "a factory beside a defaultdict": b"(" + defaultdict(FACTORY, b"}") + FACTORY + b"t",
    "a factory in a set": b"(" + defaultdict(FACTORY, b"}") + call("builtins.set", b"]" + FACTORY + b"a") + b"t",
    "a factory as a key": b"(" + defaultdict(NONE, b"}") + b"}" + FACTORY + b"K\x01st",
    "a factory in a namespace": b"("
    + defaultdict(NONE, b"}") + call("argparse.Namespace") + b"}" + text("x") + FACTORY + b"sbt",
    "a factory in a defaultdict": defaultdict(b"N", b"}" + text("a") + name("builtins.str") + b"s"),
    "a factory in an attribute": b"("
    + defaultdict(NONE, b"}") + call("collections.OrderedDict") + b"}" + text("x") + FACTORY + b"sbt",
    "a defaultdict of a function": defaultdict(name("torch._utils._rebuild_tensor_v2"), b"}"),
    "a defaultdict of a class": defaultdict(name("builtins.bytearray"), b"}"),
    "a defaultdict of a set of a defaultdict": defaultdict(name("collections.defaultdict"), b"}"),
    "a defaultdict of an object": defaultdict(call("builtins.set", b"]"), b"}"),
    "a defaultdict of a list": defaultdict(b"N", b"]"),
    "a defaultdict of three": defaultdict(b"N", b"}", b"}"),
    "a new defaultdict": name("collections.defaultdict") + b"(N}t\x81",
    "a deque of text": call("collections.deque", text("abc")),
    "a deque of a negative length": call("collections.deque", b"]", b"J\xff\xff\xff\xff"),
    "a deque of a length of text": call("collections.deque", b"]", text("a")),
    "a deque that is filled": call("collections.deque", b"]") + b"K\x01a",
    "a deque with attributes": call("collections.deque", b"]") + b"}b",
    "a frozenset of text": call("builtins.frozenset", text("abc")),
    "a frozenset of what cannot be hashed": call("builtins.frozenset", b"](]e"),
    "a scalar without bytes": scalar(dtype("f8")),
    "a scalar of few bytes": scalar(dtype("f8"), small(b"abc")),
    "a scalar of an object": scalar(dtype("O"), name("builtins.set")),
    "a scalar of a record": scalar(dtype("V1000000000"), small(b"a")),
    "a huge scalar of text": scalar(dtype("U500000000"), small(b"a")),
    "a huge scalar of bytes": scalar(dtype("S2000000000")),
    "a scalar of no type": scalar(text("f8"), small(b"12345678")),
    "a time of ten million years": call("datetime.datetime", b"J\x00\x00\x00\x10", b"K\x01", b"K\x01"),
    "a time of odd bytes": call("datetime.datetime", small(b"\xff" * 10)),
    "a time in a zone that is called": call("datetime.datetime", small(b"\x07\xe8\x01\x01" + bytes(6)), FACTORY),
    "a time with attributes": call("datetime.date", b"M\xe8\x07", b"K\x01", b"K\x01") + b"}" + text("x") + b"K\x01sb",
    "a time of now": b"cdatetime\ndatetime.now\n(tR",
    "a zone of a day": call("datetime.timezone", call("datetime.timedelta", b"K\x05")),
    "a duration of all time": call("datetime.timedelta", b"J\xff\xff\xff\x7f"),
    "a module of the system": b"cos\nsystem\n" + text("true") + b"\x85R",
    "a function that evaluates": call("builtins.eval", text("1")),
    "a function of a class": call("builtins.getattr", text("a"), text("join")),
}  # fmt: skip
if hasattr(torch._weights_only_unpickler.Unpickler, "_check_set_item_target"):
    # The unpickler of torch 2.9 fills whatever it is told to, as far as that takes items.
    HOSTILE["a defaultdict that is filled"] = defaultdict(b"N") + b"K\x01K\x02s"


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_uses_of_the_allowed_names_are_refused_at_once(kind):
    pickled = b"\x80\x02" + HOSTILE[kind] + b"."
    with pytest.raises(CheckpointError) as caught:
        load_torch_item(archive(pickled), "common.pt")
    assert str(caught.value).startswith("common.pt: must be")
    assert "magic" not in str(caught.value)
    assert len(str(caught.value)) < 500


def archive(pickled):
    """Archive of torch with a pickle."""
    stream = BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return stream.getvalue()


def test_hostile_uses_take_little_memory():
    """In a process that may take 1 GiB more than it has."""

    def errors():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30),) * 2)
        found = []
        for content in HOSTILE.values():
            with pytest.raises(CheckpointError) as caught:
                load_torch_item(archive(b"\x80\x02" + content + b"."), "x")
            found.append(str(caught.value))
        return found

    assert not [error for error in run_in_fork(errors) if "Memory" in error or "memory" in error]


def test_a_factory_is_a_class_that_is_not_allowed_where_there_is_no_defaultdict():
    pickled = b"\x80\x02}" + text("cast") + name("builtins.int") + b"s."
    for content in (pickled, pickled.replace(b"cast", b"defaultdict").replace(b"\x04\0\0\0", b"\x0b\0\0\0")):
        with pytest.raises(CheckpointError, match=r"has 'int' \((builtins\.)?int\)"):
            load_torch_item(archive(content), "common.pt")


def test_many_references_to_one_list_are_not_multiplied():
    """Each list has ten times the one before: written out, they would be 10 ** 30 elements."""
    value = [1]
    for _ in range(30):
        value = [value] * 10
    content = b"\x80\x02" + defaultdict(name("builtins.list"), small({"a": value})) + b"."
    assert len(load_torch_item(archive(content), "x")["a"]) == 10


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_is_loaded_by_the_names_that_releases_of_python_give_it(module):
    pickled = b"\x80\x02" + name(f"{module}.PosixPath") + b"(" + text("a") + text("b") + b"tR."
    assert load_torch_item(archive(pickled), "common.pt") == Path("a/b")


def test_each_name_of_the_list_is_of_data():
    """What is new on the list must be looked at here: it can be called by a file, with arguments of the file's own."""
    names = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in _DATA}
    types = {one for one in names if re.fullmatch(r"numpy\.dtypes\.\w+DType", one)}
    signals = {f"signal.{name}" for name in signal.Signals.__members__}
    assert names - types - signals == {
        "_io.BytesIO", "argparse.Namespace", "builtins.bytes", "builtins.frozenset", "builtins.getattr",
        "collections.deque",
        "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "datetime.timezone",
        "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar", "numpy.dtype", "numpy.ndarray",
        "pathlib.PosixPath", "pathlib._local.PosixPath", "signal.Signals",
        "types.SimpleNamespace",
    }  # fmt: skip
    assert not {"numpy.dtypes.ObjectDType", "numpy.dtypes.VoidDType"} & types
    stand_ins = [one for one, _ in _OF_DEFAULTDICTS[1:]]
    assert all(isinstance(one, FactoryStandIn) and not callable(one) for one in stand_ins)


def test_the_list_of_the_program_is_as_before_after_an_error():
    before = torch.serialization.get_safe_globals()
    for with_defaultdicts in (False, True):
        with pytest.raises(KeyError), allowing(with_defaultdicts=with_defaultdicts):
            raise KeyError
    with torch.serialization.safe_globals([collections.defaultdict, int]):
        with pytest.raises(KeyError), allowing(with_defaultdicts=True):
            raise KeyError
        assert {collections.defaultdict, int} <= set(torch.serialization.get_safe_globals())
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_torchs_own_list_is_as_before():
    allowed = torch._weights_only_unpickler._get_allowed_globals()
    before = dict(allowed)
    assert before["builtins.bytearray"] is bytearray
    for value in (bytearray(), bytearray(b"a\xff")):
        assert load_torch_item(archive(pickle.dumps(value, 2)), "x") == value
    with pytest.raises(CheckpointError):
        load_torch_item(archive(b"\x80\x02" + HOSTILE["many zeros in a bytearray"] + b"."), "x")
    assert dict(allowed) == before


def test_a_bytearray_of_older_versions_of_python_is_read():
    content = b"\x80\x02" + call("__builtin__.bytearray", text("a\xff"), text("latin-1")) + b"."
    assert load_torch_item(archive(content), "x") == bytearray(b"a\xff")


def test_scalars_of_both_names_are_read():
    value = np.float64(1.5)
    for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        content = pickle.dumps(value, 2).replace(b"numpy._core.multiarray", module)
        assert load_torch_item(archive(content), "x") == value
