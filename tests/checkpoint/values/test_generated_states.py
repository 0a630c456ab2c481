"""Generated states come back equal and of their classes, or are refused with the place of a value that is not kept."""

import collections
import datetime as dt
import io

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints.own_classes import (
    ALLOWED,
    Color,
    Options,
    Plain,
    Point,
    Range,
    Ring,
    Sequence,
    is_same,
    torch_keeps_exceptions,
)
from trackbed.checkpoint import ShardedObject, ShardedTensor, load
from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes
from trackbed.checkpoint.save import save
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError

EXAMPLES = settings(max_examples=200 if settings().max_examples < 2000 else 2000)
KINDS = ["?", "b", "h", "i", "l", "B", "H", "I", "L", "e", "f", "d", "F", "D", "U3", "S2", "M8[s]", "m8[ms]"]
FACTORIES = [None, bool, int, float, str, list, dict, set]
ZONES = st.none() | st.just(dt.UTC) | st.builds(dt.timezone, st.timedeltas(dt.timedelta(-1), dt.timedelta(hours=23)))


@st.composite
def arrays(draw, *, scalar):
    """An array of NumPy, or one of its elements."""
    shape = () if scalar else tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape))
    numbers = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    array = np.array(numbers, dtype="int64").astype(draw(st.sampled_from(KINDS))).reshape(shape)
    return array[()] if scalar else array


def tensors():
    return st.builds(
        lambda shape, dtype: torch.ones(shape).to(dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    )


hashable = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.binary(max_size=5) | arrays(scalar=True) | st.complex_numbers(allow_nan=False) | st.dates() | st.timedeltas()
    | st.datetimes(timezones=ZONES) | st.times(timezones=ZONES) | st.sampled_from([*Color, np.float64(1), dt.UTC]),
    lambda below: st.lists(below, max_size=3).map(tuple) | st.frozensets(below, max_size=3)
    | st.builds(Point, below, below) | st.builds(Range, below),
    max_leaves=4,
)  # fmt: skip
leaves = hashable | st.just(float("nan")) | arrays(scalar=False) | tensors() | st.binary(max_size=3).map(bytearray)


def containers(below):
    items = st.lists(st.tuples(hashable, below), max_size=3)
    return (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.sets(hashable, max_size=3)
        | items.map(dict)
        | items.map(collections.OrderedDict)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(collections.Counter)
        | st.builds(collections.defaultdict, st.sampled_from(FACTORIES), items)
        | st.builds(collections.deque, st.lists(below, max_size=3), st.none() | st.integers(3, 5))
        | st.builds(Point, below, below)
    )


kept = st.recursive(leaves, containers, max_leaves=10)
refused = st.sampled_from(
    [Options(a=1), Options(), Sequence([1]), Ring([1]), Plain(),
     *([] if torch_keeps_exceptions() else [ValueError("x")]), collections.defaultdict(lambda: 1),
     2**3000, lambda: 1, np.array([None]), collections.UserDict(), io.StringIO(), Plain, (x for x in [1])]
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def allowed():
    with torch.serialization.safe_globals(ALLOWED):
        yield


@EXAMPLES
@given(kept)
def test_kept_classes_are_never_refused_and_come_back(value):
    state = {"a": [value, {"b": value}]}
    assert is_same(load_torch_item(torch_bytes(state, "common.pt"), "common.pt"), state)


@EXAMPLES
@given(
    kept,
    refused,
    st.lists(st.sampled_from(["dict", "list", "tuple", "ordered", "deque", "point", "default"]), max_size=4),
)
def test_a_value_that_is_not_kept_is_refused_with_its_place(value, other, wrappers):
    place = []
    for wrapper in wrappers:
        name, other = wrapped(wrapper, value, other)
        place.insert(0, name)
    event(f"{len(place)} containers")
    with pytest.raises(CheckpointError) as caught:
        torch_bytes({"a": value, "x": other}, "common.pt")
    assert str(caught.value).startswith(f"common.pt: {'.'.join(['x', *place])} must be ")


def test_sets_in_sets_come_back_with_what_equals_nothing():
    for number in range(20):  # the order of their elements is another one each time
        value = {frozenset({Range(None, float("nan")), None, (number, frozenset({float("nan"), Range(0, 1)}))})}
        torch_bytes({"a": value}, "common.pt")


def wrapped(wrapper, value, other):
    """Place of a value in a container, and the container."""
    if wrapper == "dict":
        return "k", {"j": value, "k": other}
    if wrapper == "ordered":
        return "3", collections.OrderedDict([(1, value), (3, other)])
    if wrapper == "default":
        return "k", collections.defaultdict(None, k=other)
    if wrapper == "point":
        return "1", Point(value, other)
    return "1", {"list": list, "tuple": tuple, "deque": collections.deque}[wrapper]([value, other])


@settings(max_examples=EXAMPLES.max_examples // 10)
@given(st.dictionaries(st.text(max_size=5) | st.integers(), kept, max_size=4))
def test_generated_states_come_back_from_folders(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("states") / "step"
    save(state, folder, group=SOLO)
    assert is_same(load(folder, group=SOLO), state)


@st.composite
def trees(draw, depth=3):
    """A tree of containers with plain values and shards, as a function of the values of its tensors."""
    kind = draw(
        st.sampled_from(["plain", "shard", "object"] if depth == 0 else ["dict", "list", "plain", "shard", "object"])
    )
    if kind == "plain":
        value = draw(kept)
        return lambda key, wanted: value
    if kind == "shard":
        shape = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
        return lambda key, wanted: ShardedTensor.from_rank_offsets(key, torch.full(shape, 0.0 if wanted else 3.0))
    if kind == "object":
        value = draw(kept)
        return lambda key, wanted: ShardedObject(key, None if wanted else value, (1,), (0,))
    below = draw(st.lists(trees(depth=depth - 1), max_size=3))
    if kind == "list":
        return lambda key, wanted: [one(f"{key}.{number}", wanted) for number, one in enumerate(below)]
    container = draw(
        st.sampled_from([dict, collections.OrderedDict, collections.Counter, collections.defaultdict, Options])
    )

    def build(key, wanted):
        found = container()
        for number, one in enumerate(below):
            found[number] = one(f"{key}.{number}", wanted)
        return found

    return build


def loaded_form(value):
    """What is loaded: data in the places of shards. Containers of shards alone are plain ones."""
    if isinstance(value, ShardedTensor | ShardedObject):
        return value.data
    if type(value) not in (dict, list, collections.OrderedDict, collections.Counter, collections.defaultdict, Options):
        return value
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    kinds = {has_plain(below) for _, below in pairs}
    items = [(key, loaded_form(below)) for key, below in pairs]
    if isinstance(value, list):
        return [below for _, below in items]
    found = {} if kinds == {False} else type(value)()
    for key, below in items:
        found[key] = below
    return found


def has_plain(value):
    if isinstance(value, ShardedTensor | ShardedObject):
        return False
    if (
        type(value) in (dict, list, collections.OrderedDict, collections.Counter, collections.defaultdict, Options)
        and value
    ):
        return any(map(has_plain, value.values() if isinstance(value, dict) else value))
    return True


def in_any_order(value):
    """The value with the items of dictionaries sorted: plain ones come before shards when they are loaded."""
    if isinstance(value, dict):
        ordered = type(value)()
        for key in sorted(value, key=repr):
            ordered[key] = in_any_order(value[key])
        return ordered
    return [in_any_order(one) for one in value] if type(value) is list else value


def error_of_save(state, folder):
    try:
        save(state, folder, group=SOLO)
    except CheckpointError as error:
        return str(error)
    return ""


@settings(max_examples=EXAMPLES.max_examples // 4)
@given(st.lists(trees(), max_size=3))
def test_generated_trees_with_shards_come_back_or_are_refused(tmp_path_factory, below):
    def state(wanted):
        return {f"k{number}": one(f"k{number}", wanted) for number, one in enumerate(below)}

    folder = tmp_path_factory.mktemp("trees") / "step"
    refusal = error_of_save(state(wanted=False), folder)
    event("refused" if refusal else "saved")
    if refusal:
        assert "must all be shards" in refusal or "must be a plain dict" in refusal
        return
    loaded = load(state(wanted=True), folder, group=SOLO)
    assert is_same(in_any_order(loaded), in_any_order(loaded_form(state(wanted=False))))
