import numpy as np
import pytest

from trackbed.index.ranges import bounds_of, number_range


def test_views_of_shared_numbers_are_not_compared_even_if_their_array_was_outgrown(monkeypatch):
    old = number_range(3, 50_000)
    new = number_range(4, 2 * len(old.base))
    monkeypatch.setattr(np, "diff", None)
    assert new.base is not old.base
    assert bounds_of(old) == (3, 50_000)
    assert bounds_of(new) == (4, 2 * len(old.base))
    with pytest.raises(TypeError):
        bounds_of(old.copy())  # compared
