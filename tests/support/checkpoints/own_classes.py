"""Classes of a program, which it allows or not, and the comparison of what it saves with what it loads."""

import collections
import dataclasses
import datetime as dt
import enum
import io
import pickle
from typing import NamedTuple

import numpy as np
import torch

from trackbed.checkpoint import ShardedObject, load
from trackbed.checkpoint.save import save
from trackbed.comm import SOLO


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Name(enum.StrEnum):
    ADAM = "adam"


Point = collections.namedtuple("Point", ["x", "y"])


class Range(NamedTuple):
    low: int
    high: float = 1.0


class Text(str):
    pass


class Whole(int):
    pass


class Group(set):
    pass


class Options(dict):
    __getattr__ = dict.__getitem__


class Sequence(list):
    pass


class Ordered(collections.OrderedDict):
    pass


class Tally(collections.Counter):
    pass


class Ring(collections.deque):
    pass


class Grouped(collections.defaultdict):
    pass


class AsCall(dict):
    """A dictionary that pickles as one call with its contents."""

    def __reduce__(self):
        return AsCall, (dict(self),)


class Scaled(tuple):
    """A tuple that is made with other contents than it has."""

    def __new__(cls, values):
        return super().__new__(cls, [2 * value for value in values])


class Plain:
    def __init__(self, value=1):
        self.value = value


@dataclasses.dataclass
class Record:
    value: int = 1


ALLOWED = [Color, Level, Mode, Name, Point, Range, Text, Whole, Group]


def saved_and_loaded(value, folder):
    """A value from the common state, where it lies in dictionaries and lists, and from an object."""
    state = {"a": {"b": [value]}, "o": ShardedObject("o", (value,), (1,), (0,))}
    save(state, folder, group=SOLO)
    loaded = load({"o": ShardedObject("o", None, (1,), (0,))}, folder, group=SOLO)
    return loaded["a"]["b"][0], loaded["o"][0]


def is_same(one, other):
    """True if two values are equal, and of one class, at any depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and same_elements(one, other)
    if isinstance(one, collections.defaultdict):
        return one.default_factory is other.default_factory and same_items(one, other)
    if isinstance(one, dict):
        return same_items(one, other)
    if isinstance(one, collections.deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(is_same(a, b) for b in other) for a in one)
    if isinstance(one, dt.datetime | dt.time) and (one.fold, one.tzinfo) != (other.fold, other.tzinfo):
        return False
    return one == other or repr(one) == repr(other)  # NaN


def same_items(one, other):
    return is_same(list(one), list(other)) and all(map(is_same, one.values(), other.values()))


def same_elements(one, other):
    return one.tobytes() == other.tobytes() or bool(np.all((one == other) | ((one != one) & (other != other))))


def torch_keeps_exceptions():
    """True for releases of torch that load exceptions without being asked, from 2.14 on."""
    stream = io.BytesIO()
    torch.save(ValueError("x"), stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True
