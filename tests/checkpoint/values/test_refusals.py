"""Values that would come back as others are refused at the save, with their place and advice that works."""

import argparse
import collections
import datetime as dt
import decimal
import re
import types
import zoneinfo

import numpy as np
import pytest
import torch

from tests.support.checkpoints.own_classes import (
    AsCall,
    Color,
    Group,
    Grouped,
    Mode,
    Options,
    Ordered,
    Plain,
    Point,
    Record,
    Ring,
    Scaled,
    Sequence,
    Tally,
    Text,
    is_same,
    saved_and_loaded,
    torch_keeps_exceptions,
)
from trackbed import DataParallelOptimizer, DistributedDataParallel, sharded_state
from trackbed.checkpoint import ShardedObject, ShardedTensor, ShardedTensorFactory, load
from trackbed.checkpoint.save import save
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization


class Outer:
    class Inner(Plain):
        pass


PLAIN_FORMS = {
    "a dictionary": (Options(lr=1), "dict(value)", dict),
    "an empty dictionary": (Options(), "dict(value)", dict),
    "an ordered dictionary": (Ordered(a=1), "dict(value)", dict),
    "a defaultdict": (Grouped(int, a=1), "dict(value)", dict),
    "a defaultdict with a function": (collections.defaultdict(lambda: 1, a=1), "dict(value)", dict),
    "a defaultdict with another class": (collections.defaultdict(tuple, a=1), "dict(value)", dict),
    "a defaultdict of tensors": (collections.defaultdict(torch.Tensor, a=1), "dict(value)", dict),
    "a list": (Sequence([1]), "list(value)", list),
    "a deque": (Ring([1]), "collections.deque(value)", collections.deque),
    "a tuple that changes": (Scaled([1, 2]), "tuple(value)", tuple),
    "an exception": (ValueError("x"), "str(value)", str),
    "an exception of the system": (OSError(1, "x"), "str(value)", str),
    "a large number": (2**3000, "str(value)", str),
    "an array of objects": (np.array([1, None], dtype=object), "value.tolist()", lambda value: value.tolist()),
    "a structured array": (np.zeros(2, [("a", "i4")]), "value.tolist()", lambda value: value.tolist()),
    "a record of NumPy": (np.zeros(2, [("a", "i4")])[0], "value.tolist()", lambda value: list(value.tolist())),
    "a mapping": (types.MappingProxyType({"a": 1}), "dict(value)", dict),
    "the values of a dictionary": ({"a": 1}.values(), "list(value)", list),
    "text of NumPy with NUL": (np.str_("a\0"), '"".join(value)', "".join),
    "bytes of NumPy with NUL": (np.bytes_(b"ab\0"), "bytes(value)", bytes),
    "a memoryview": (memoryview(b"a"), "bytes(value)", bytes),
    "a storage without a type": (
        torch.arange(4.0).untyped_storage(),
        "torch.tensor(value, dtype=torch.uint8)",
        lambda value: torch.tensor(value, dtype=torch.uint8),
    ),
    "a function without a name": (lambda: 1, "its name", lambda value: value.__name__),
    "a time in a zone of another class": (
        dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "value.astimezone(datetime.timezone.utc)",
        lambda value: value.astimezone(dt.UTC),
    ),
}
"""Value, the end of the advice, and the function that it recommends."""
if torch_keeps_exceptions():
    del PLAIN_FORMS["an exception"], PLAIN_FORMS["an exception of the system"]
TO_BE_ALLOWED = {
    "an object": (Plain(), [Plain]),
    "a data class": (Record(2), [Record]),
    "an enum": (Color.RED, [Color]),
    "a flag": (Mode.READ, [Mode]),
    "a named tuple": (Point(1, 2), [Point]),
    "text": (Text("a"), [Text]),
    "a set": (Group([1]), [Group]),
    "a dictionary that is one call": (AsCall(a=1), [AsCall]),
    "a counter of another class": (Tally("ab"), [Tally]),
    "a range": (range(3), [range]),
    "a class": (Plain, [Plain]),
    "a function": (saved_and_loaded, [saved_and_loaded]),
    "a class of factories": (int, [int]),
    "a decimal": (decimal.Decimal("1.5"), [decimal.Decimal]),
    "a masked array": (np.ma.masked_array([1, 2]), [np.ma.MaskedArray, np.ma.core._mareconstruct]),
}


def refused(state, folder):
    with pytest.raises(CheckpointError) as caught:
        save(state, folder, group=SOLO)
    assert not folder.exists()
    return str(caught.value)


@pytest.mark.parametrize("kind", PLAIN_FORMS)
def test_a_value_that_cannot_come_back_is_refused_with_what_to_save(kind, tmp_path):
    value, advice, form = PLAIN_FORMS[kind]
    for place, state in {
        "a.b.0": {"a": {"b": [value]}},
        "a.0.x": {"a": ({"x": value},)},
        "a.x": {"a": collections.OrderedDict(x=value)},
        "o/shard_0_1: b": {"o": ShardedObject("o", {"b": value}, (1,), (0,))},
    }.items():
        error = refused(state, tmp_path / "step")
        assert re.search(rf"{re.escape(place)}(\.argument 1)? must be", error), error
        assert f"save {advice}" in error or advice in error
    with torch.serialization.safe_globals([type(value)] if type(value) is not int else []):
        refused({"a": [value]}, tmp_path / "step")  # whether the program allows its class or not
    assert saved_and_loaded(form(value), tmp_path / "form")


@pytest.mark.parametrize("kind", TO_BE_ALLOWED)
def test_a_class_that_is_not_allowed_is_refused_and_saved_as_advised(kind, tmp_path):
    value, classes = TO_BE_ALLOWED[kind]
    error = refused({"x": 1, "a": {"b": [0, value]}}, tmp_path / "step")
    names = ", ".join(f"{one.__module__}.{one.__qualname__}" for one in classes)
    assert "common.pt: a.b.1 must be made of classes that are allowed" in error
    assert f"call torch.serialization.add_safe_globals([{names}])" in error
    assert "exceptions." not in error
    assert not isinstance(value, dict) or "or save dict(value)" in error
    with torch.serialization.safe_globals(classes):
        loaded = saved_and_loaded(value, tmp_path / "step")
        assert all(type(found) is type(value) for found in loaded)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"x": {Text("a"): 1}}, "x.key 0"),
        ({"x": {(1, Text("a")): 1}}, "x.key 0.1"),
        ({"x": {1, Text("a")}}, r"x\.\d"),
        ({"x": collections.deque([1, Text("a")])}, "x.1"),
        ({"x": collections.defaultdict(int, a=Text("a"))}, "x.a"),
        ({"x": argparse.Namespace(lr=[Text("a")])}, "x.lr.0"),
        ({1: {None: Text("a")}}, "1.None"),
        ({"\udc80": Text("a")}, r"\\udc80"),
    ],
)
def test_the_place_of_a_value_is_named_wherever_it_lies(value, place, tmp_path):
    assert re.search(rf"common.pt: {place} must be .*'Text'", refused(value, tmp_path / "step"))


@pytest.mark.parametrize(
    "view", [lambda x: x.view(torch.int32), lambda x: x[1:].view(torch.uint8), torch.view_as_complex]
)
def test_two_tensors_that_view_the_same_memory_with_different_types_are_named(view, tmp_path):
    x = torch.ones(4, 2)
    error = refused({"x": x, "y": {"z": [view(x)]}}, tmp_path / "step")
    assert "y.z.0 must be of type torch.float32, as x, which views the same memory, but is of torch." in error
    assert saved_and_loaded({"x": x, "y": {"z": [view(x).clone()]}}, tmp_path / "clone")


def test_an_attribute_of_a_tensor_is_named(tmp_path):
    tensor = torch.ones(2)
    tensor.note = Plain()
    assert "w.note must be made of classes" in refused({"w": tensor}, tmp_path / "step")


def test_a_value_in_the_options_of_an_optimizer_is_named(tmp_path):
    module = torch.nn.Linear(2, 2)
    model = DistributedDataParallel(module)
    adamw = torch.optim.AdamW(module.parameters())
    optimizer = DataParallelOptimizer(adamw, model)
    adamw.param_groups[0]["lr"] = type("Rate", (float,), {"__module__": "nowhere"})(0.1)
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.0\.lr must be a value that can be pickled"):
        save(sharded_state(model, optimizer), tmp_path / "step", group=SOLO)


def test_a_class_in_another_one_is_refused_with_a_form_that_works(tmp_path):
    error = refused({"a": Outer.Inner()}, tmp_path / "step")
    assert "a must be" in error
    assert "add_safe_globals" not in error


def nested(depth, kind):
    value = 1
    for _ in range(depth):
        value = [value] if kind is list else kind(a=value)
    return value


@pytest.mark.parametrize("depth", [1_000, 50_000])
@pytest.mark.parametrize("kind", [list, dict, collections.OrderedDict])
def test_the_place_of_a_value_that_is_nested_too_deeply_is_named(kind, depth, tmp_path):
    state = {"lr": [1, {"x": 2}], "options": {"tree": nested(depth, kind)}}
    error = refused(state, tmp_path / "step")
    assert re.search(r"options\.tree\.([a0]\.){5}[a0]\.\.\. \([\d,]+ levels\) must be nested less deeply", error), error
    state["options"]["tree"] = nested(200, kind)
    assert saved_and_loaded(state, tmp_path / "step")


def test_a_request_that_is_nested_too_deeply_or_contains_itself_is_refused(tmp_path):
    save({"x": 1}, tmp_path / "step", group=SOLO)
    loop = {}
    loop["a"] = [loop]
    for state in ({"x": nested(50_000, list)}, {"x": loop}):
        with pytest.raises(CheckpointError, match="must be nested less deeply"):
            load(state, tmp_path / "step", group=SOLO)


@pytest.mark.parametrize("state", [[{"step": 1}, torch.ones(2)], (1,), None, 5, "text", torch.ones(2), {1}, [], [1]])
def test_a_state_that_is_no_dictionary_is_refused(state, tmp_path):
    assert "state: must be a dictionary, but is of " in refused(state, tmp_path / "step")


def test_a_list_of_shards_is_refused_by_save_and_load(tmp_path):
    shards = [ShardedTensor.from_rank_offsets("w", torch.ones(2))]
    assert "must be a dictionary, but is of list" in refused(shards, tmp_path / "step")
    save({"w": shards[0]}, tmp_path / "step", group=SOLO)
    with pytest.raises(CheckpointError, match="must be a dictionary, but is of list"):
        load(shards, tmp_path / "step", group=SOLO)


def test_a_state_of_another_class_is_refused(tmp_path):
    assert "state: the top must be a plain dict" in refused(Options(a=1), tmp_path / "step")
    mixed = Options(a=1, w=ShardedTensor.from_rank_offsets("w", torch.ones(2)))
    assert "state: m must be a plain dict" in refused({"m": mixed}, tmp_path / "step")
    listed = Sequence([[ShardedTensor.from_rank_offsets("w", torch.ones(2))], [1]])
    assert "state: m must be a plain list" in refused({"m": listed}, tmp_path / "step")


@pytest.mark.parametrize("key", [5, None, 1.5, (1, 2), [1], {}, b"w", torch.ones(1), "\udc80", "a\ud800b", True])
def test_a_key_that_is_no_text_is_refused_with_the_key(key, tmp_path):
    tensor = torch.ones(2)
    entries = {
        "tensor": ShardedTensor.from_rank_offsets(key, tensor),
        "object": ShardedObject(key, 1, (1,), (0,)),
        "factory": ShardedTensorFactory(
            key,
            tensor,
            lambda _, data, *__: {"v": ShardedTensor.from_rank_offsets("v", data)},
            lambda state: state["v"],
        ),
    }
    for entry in entries.values():
        error = refused({"a": entry}, tmp_path / "step")
        assert "key of an entry: must be text" in error
        assert repr(key)[:20] in error
    with pytest.raises(CheckpointError, match="key of an entry: must be text"):
        serialization.save({"a": entries["tensor"]}, tmp_path / "step", async_sharded_save=True).execute_sync()


def test_a_key_that_is_no_text_is_refused_on_all_ranks(tmp_path):
    def on(group):
        entry = ShardedTensor.from_rank_offsets("\udc80" if group.rank == 1 else "w", torch.ones(2), replica_id=0)
        with pytest.raises(CheckpointError, match=r"rank 1: CheckpointError: key of an entry: must be text"):
            save({"w": entry}, tmp_path / "step", group=group)

    run_ranks(2, on)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "a.b/c", "é", np.str_("w"), Text("w"), "with\nline"])
def test_a_key_of_any_text_is_saved_and_opened(key, tmp_path):
    save({"w": ShardedTensor.from_rank_offsets(key, torch.ones(2))}, tmp_path / "step", group=SOLO)
    wanted = {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(2))}
    assert load(wanted, tmp_path / "step", group=SOLO)["w"].tolist() == [1, 1]


def test_keys_of_dictionaries_may_be_anything_that_is_kept(tmp_path):
    value = {5: {None: 1}, "\udc80": torch.ones(20_000), (1, "a"): {"b": b""}, 1.5: [2]}
    run_ranks(2, lambda group: save(value, tmp_path / "step", group=group))
    assert is_same(load(tmp_path / "step", group=SOLO), value)


def test_a_tuple_that_contains_itself_is_refused_with_its_place(tmp_path):
    inner = []
    ring = (inner, 1)
    inner.append(ring)
    assert "common.pt: x must be a value that" in refused({"x": ring}, tmp_path / "step")


def test_a_container_that_contains_itself_is_refused_with_its_place(tmp_path):
    ring = {"a": [1]}
    ring["a"].append(ring)
    assert "x.a.1 must be a value that does not contain itself" in refused({"x": ring}, tmp_path / "step")


def test_a_value_in_an_object_of_another_rank_is_named_on_all_ranks(tmp_path):
    def on(group):
        entry = ShardedObject("o", {"b": Options() if group.rank else {}}, (2,), (group.rank,))
        with pytest.raises(CheckpointError, match=r"rank 1: CheckpointError: o/shard_1_2: b must be a plain dict"):
            save({"o": entry}, tmp_path / "step", group=group)

    run_ranks(2, on)
    assert list(tmp_path.iterdir()) == []


class _Unknown:
    pass


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])])
def test_an_object_with_a_state_is_refused_with_the_advice_to_save_that(value, tmp_path):
    value.hidden = _Unknown()
    advice = r"inside must be a plain value, but is of torch\.[\w.]+: save its state_dict\(\)"
    with pytest.raises(CheckpointError, match=rf"common\.pt: x\.0\.{advice}"):
        save({"x": ({"inside": value},)}, tmp_path / "step-1")


def test_arguments_in_the_wrong_order_are_told(tmp_path):
    with pytest.raises(CheckpointError, match="must be a path, but is of dict: the state comes first, then the folder"):
        save(tmp_path / "step-1", {"step": 1})
