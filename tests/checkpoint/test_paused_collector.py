"""The collector of cycles is paused in saves and loads, and what the program wants afterwards."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.forked import run_in_fork
from trackbed.checkpoint import load, save
from trackbed.checkpoint.paused_collector import paused_collector
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError


class SeesCollector:
    """Object of a state that notes whether the collector runs."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def state_dict(self) -> dict[str, int]:
        """Called by saves and loads."""
        self.seen.append(gc.isenabled())
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Called by loads."""
        self.seen.append(gc.isenabled())


@pytest.fixture(params=[True, False], ids=["on", "off"])
def is_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the program has the collector on."""
    if not request.param:
        gc.disable()
    try:
        yield request.param
    finally:
        gc.enable()


def test_collector_is_as_before_after_calls_and_errors(tmp_path: Path, *, is_on: bool) -> None:
    seeing = SeesCollector()
    save({"one": seeing}, tmp_path / "checkpoint", group=SOLO)
    assert gc.isenabled() == is_on
    load({"one": seeing}, tmp_path / "checkpoint", group=SOLO)
    assert gc.isenabled() == is_on
    with pytest.raises(CheckpointError):
        load(tmp_path / "no checkpoint", group=SOLO)
    assert gc.isenabled() == is_on
    assert seeing.seen
    assert not any(seeing.seen)


def test_a_process_that_is_forked_meanwhile_has_a_collector() -> None:
    with paused_collector():
        assert run_in_fork(gc.isenabled)
        assert not gc.isenabled()
