"""Plain values come back equal and of their class, wherever they lie."""

import collections
import datetime as dt
import io
import math
import signal
import types

import numpy as np
import pytest
import torch

from tests.support.checkpoints.own_classes import (
    ALLOWED,
    AsCall,
    Color,
    Level,
    Mode,
    Name,
    Point,
    Range,
    Text,
    Whole,
    is_same,
    saved_and_loaded,
)
from trackbed import DataParallelOptimizer, DistributedDataParallel, sharded_state
from trackbed.checkpoint import ShardedTensor, load
from trackbed.checkpoint.save import save
from trackbed.comm import SOLO
from trackbed.megatron.checkpoints import serialization

ZONE = dt.timezone(dt.timedelta(hours=5, minutes=30), "five and a half")

CONTAINERS = {
    "defaultdict without a factory": collections.defaultdict(None, a=1),
    "Counter": collections.Counter("abca"),
    "empty Counter": collections.Counter(),
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "deque": collections.deque([1, (2,)]),
    "empty deque": collections.deque(),
    "deque with a limit": collections.deque([1, 2], 5),
    "deque of no length": collections.deque(maxlen=0),
    "set": {1, "a"},
    "empty set": set(),
    "frozenset": frozenset([1, (2, 3)]),
    "empty frozenset": frozenset(),
    "tuple of all": (collections.Counter("a"), collections.deque([collections.OrderedDict(a={})])),
    "defaultdicts in each other": collections.defaultdict(dict, {1: collections.defaultdict(list, a=[1])}),
    "keys of all kinds": {1: 1, None: 2, (1, 2): 3, b"": 4, frozenset(): 5, 1.5: 6, True and "t": 7, np.int64(9): 8},
    "deep": [[[[[{"a": ({"b": [collections.deque()]},)}]]]]],
}
ATOMS = {
    "empty bytes": b"",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"a"),
    "empty bytearray": bytearray(),
    "large number": 2**100,
    "negative number": -(2**64),
    "complex": 1 - 2j,
    "infinite": -math.inf,
    "nan": math.nan,
    "negative zero": -0.0,
    "none": None,
    "surrogate": "\udc80",
    "type of torch": torch.float16,
    "device": torch.device("cpu"),
    "shape": torch.Size([2, 0]),
    "signal": signal.SIGTERM,
    "naive time": dt.datetime(2024, 10, 27, 2, 30, fold=1),
    "time in UTC": dt.datetime(2024, 10, 27, tzinfo=dt.UTC),
    "time in a zone": dt.datetime(1, 1, 1, tzinfo=ZONE),
    "time of day": dt.time(23, 59, 59, 999_999, fold=1),
    "time of day in a zone": dt.time(1, tzinfo=ZONE),
    "day": dt.date(9999, 12, 31),
    "duration": dt.timedelta(-1, 5, 7),
    "zone": ZONE,
    "UTC": dt.UTC,
}
NUMPY = {
    **{
        f"scalar of {kind}": np.zeros((), kind)[()] + np.ones((), kind)
        for kind in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
    },
    "bool": np.bool_(False),
    "text": np.str_("é"),
    "empty text": np.str_(""),
    "bytes": np.bytes_(b"a\0b"),
    "empty bytes": np.bytes_(b""),
    "day": np.datetime64("2020-02-29"),
    "nanosecond": np.datetime64(5, "ns"),
    "no time": np.datetime64("NaT", "s"),
    "duration": np.timedelta64(3, "h"),
    "nan": np.float32("nan"),
    "array": np.arange(6).reshape(2, 3),
    "array of another order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "array without axes": np.array(5, dtype=np.int16),
    "empty array": np.zeros((2, 0, 3), np.complex64),
    "array of bool": np.array([True, False]),
    "array of text": np.array([["a", "bcd"]]),
    "array of bytes": np.array([b"a", b""]),
    "array of times": np.array(["2020-01-01", "NaT"], "M8[s]"),
    "array of durations": np.array([1, 2], "m8[ms]"),
    "array of long doubles": np.ones(2, np.longdouble) / 3,
}
PROGRAM = {
    "enum": Color.RED,
    "enum of text": Color.BLUE,
    "IntEnum": Level.HIGH,
    "Flag": Mode.READ | Mode.WRITE,
    "no Flag": Mode(0),
    "enum that is text": Name.ADAM,
    "namedtuple": Point(1, collections.Counter("a")),
    "NamedTuple": Range(0),
    "text": Text("a"),
    "number": Whole(3),
    "all together": {Color.RED: [Point(Color.BLUE, {Level.LOW})], Point(1, 2): frozenset([Name.ADAM])},
}


@pytest.mark.parametrize("values", [CONTAINERS, ATOMS, NUMPY], ids=["containers", "atoms", "numpy"])
def test_values_of_kept_classes_come_back_as_they_are(values, tmp_path):
    for number, value in enumerate(values.values()):
        for loaded in saved_and_loaded(value, tmp_path / f"{number}"):
            assert is_same(value, loaded), (value, loaded)


@pytest.mark.parametrize("factory", [None, bool, int, float, str, list, dict, set])
def test_a_defaultdict_has_its_factory_again(factory, tmp_path):
    for contents in ({}, {"a": 1, 2: [3]}):
        for loaded in saved_and_loaded(collections.defaultdict(factory, contents), tmp_path / f"{len(contents)}"):
            assert is_same(collections.defaultdict(factory, contents), loaded)
            if factory is not None:
                assert loaded["new"] == factory()


def test_enums_namedtuples_and_others_come_back_if_the_program_allowed_them(tmp_path):
    with torch.serialization.safe_globals(ALLOWED):
        for number, value in enumerate(PROGRAM.values()):
            for loaded in saved_and_loaded(value, tmp_path / f"{number}"):
                assert is_same(value, loaded), (value, loaded)


def test_a_dictionary_that_pickles_as_one_call_comes_back_if_the_program_allowed_it(tmp_path):
    with torch.serialization.safe_globals([AsCall]):
        assert all(is_same(AsCall(a=1), found) for found in saved_and_loaded(AsCall(a=1), tmp_path / "step"))


def test_an_ordered_dictionary_keeps_its_attributes(tmp_path):
    value = torch.nn.BatchNorm1d(2).state_dict()
    for loaded in saved_and_loaded(value, tmp_path / "step"):
        assert loaded._metadata == value._metadata


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.Counter, collections.defaultdict])
def test_the_state_itself_and_containers_with_shards_keep_their_class(kind, tmp_path):
    def state_of(value):
        tensor = ShardedTensor.from_rank_offsets("w", torch.full((2,), value))
        found = kind()
        found["inner"], found["n"] = kind(), 5
        found["inner"].update({"w": tensor, "note": 1}) if kind is not collections.Counter else None
        found["inner"]["w"], found["inner"]["note"] = tensor, 1
        return found

    save(state_of(3.0), tmp_path / "step", content_metadata={"a": 1}, group=SOLO)
    assert type(load(tmp_path / "step", group=SOLO)) is kind
    loaded = load(state_of(0.0), tmp_path / "step", group=SOLO)
    assert (type(loaded), type(loaded["inner"])) == (kind, kind)
    assert loaded["inner"]["w"].tolist() == [3, 3]
    assert (loaded["inner"]["note"], loaded["n"], loaded["content_metadata"]) == (1, 5, {"a": 1})


def test_a_container_of_another_class_with_shards_alone_is_loaded_as_before(tmp_path):
    class State(dict):
        pass

    save({"s": State(w=ShardedTensor.from_rank_offsets("w", torch.ones(2)))}, tmp_path / "step", group=SOLO)
    wanted = {"s": State(w=ShardedTensor.from_rank_offsets("w", torch.zeros(2)))}
    assert load(wanted, tmp_path / "step", group=SOLO)["s"]["w"].tolist() == [1, 1]


def test_empty_streams_and_namespaces_come_back(tmp_path):
    for number, value in enumerate([b"", b"x"]):
        for loaded in saved_and_loaded(io.BytesIO(value), tmp_path / f"{number}"):
            assert loaded.getvalue() == value
    value = types.SimpleNamespace(a=collections.deque([1]), b=np.float32(2))
    assert all(is_same(vars(value), vars(found)) for found in saved_and_loaded(value, tmp_path / "namespace"))


def test_the_learning_rate_that_a_schedule_of_numpy_leaves_is_saved(tmp_path):
    module = torch.nn.Linear(2, 2)
    model = DistributedDataParallel(module)
    adamw = torch.optim.AdamW(module.parameters())
    optimizer = DataParallelOptimizer(adamw, model)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5 * (1 + np.cos(math.pi * step / 100)))
    save(sharded_state(model, optimizer), tmp_path / "step", group=SOLO)
    group = load(tmp_path / "step", group=SOLO)["optimizer"]["param_groups"][0]
    assert is_same(group["lr"], np.float64(1e-3))


def test_a_program_that_allows_a_name_itself_has_its_meaning(tmp_path):
    value = {"cast": int, "counts": collections.defaultdict(int, a=1), "queue": collections.deque([1], 3)}
    others = [int, collections.defaultdict, collections.deque, frozenset, np.float64(0).__reduce__()[0]]
    with torch.serialization.safe_globals(others):
        before = set(torch.serialization.get_safe_globals())
        for loaded in saved_and_loaded(value, tmp_path / "step"):
            assert is_same(value, loaded)
        assert set(torch.serialization.get_safe_globals()) == before
    assert collections.deque not in torch.serialization.get_safe_globals()


def test_files_can_be_read_by_pickle_and_by_torch(tmp_path):
    value = {"counts": collections.defaultdict(int, a=1), "queue": collections.deque([1], 3), "lr": np.float64(2)}
    save(value, tmp_path / "step", group=SOLO)
    assert is_same(torch.load(tmp_path / "step" / "common.pt", weights_only=False), value)


def test_containers_become_dictionaries_and_lists_under_megatrons_paths(tmp_path):
    class Options(dict):
        pass

    value = {"a": collections.defaultdict(int, a=1), "b": [collections.OrderedDict(c=Options(d=1))]}
    serialization.save(value, tmp_path / "step")
    assert is_same(load(tmp_path / "step", group=SOLO), {"a": {"a": 1}, "b": [{"c": {"d": 1}}]})
