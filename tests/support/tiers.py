"""How many examples a property test takes, beyond what its tier says, and which cases of a test belong to a tier."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

with_files = settings(max_examples=min(settings().max_examples, 300))
"""For examples that write files and wait for the disk: enough, in a minute or two."""


def slow_but(fast: Sequence[Any], cases: Iterable[Any], ids: Iterable[str] = ()) -> list[Any]:
    """Cases of a parametrized test, of which all but those in `fast` are slow tests; with their ids, if there are any.

    A case is a value, or a tuple of one for each argument.
    """
    cases = list(cases)
    assert fast
    assert all(case in cases for case in fast)
    names = list(ids) or [None] * len(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name, marks=[] if case in fast else [pytest.mark.slow]
        )
        for case, name in zip(cases, names, strict=True)
    ]
