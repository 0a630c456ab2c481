"""Enums and namedtuples that this process does not know are compared by their names and contents."""

import pytest
import torch

from tests.support.checkpoints.own_classes import Color, Mode, Plain, Point
from trackbed.checkpoint.format.allowed_classes import naming_unknown
from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes

PAIRS = [
    (Point(1, 2), Point(1, 3)),
    (Color.RED, Color.BLUE),
    (Mode.READ, Mode.WRITE),
    (Plain(1), Plain(2)),
    ({Color.RED: [Point(1, Color.RED)]}, {Color.RED: [Point(1, Color.BLUE)]}),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_contents_of_classes_that_are_not_known_are_compared(one, other):
    with torch.serialization.safe_globals([Color, Mode, Plain, Point]):
        contents = [torch_bytes({"x": value}, "common.pt") for value in (one, one, other)]
    with naming_unknown() as names:
        first, again, third = (load_torch_item(content, "common.pt")["x"] for content in contents)
    assert first == again
    assert first != third
    assert {name.rpartition(".")[2] for name in names} <= {"Color", "Mode", "Plain", "Point"}
