"""`install(exchange=...)`: the way in which wrappers of Megatron Core load what several ranks want."""

from pathlib import Path

import pytest

import trackbed.megatron
from tests.support.processes.launching import run_script
from trackbed.errors import ArgumentError

RANK = Path(__file__).with_name("exchange_rank.py")


@pytest.mark.parametrize(
    ("way", "by_megatrons", "sends"),
    [
        ("not", 1, False),
        pytest.param("none", 0, False, marks=pytest.mark.slow),
        ("flat", 0, True),
        ("auto", 0, False),
    ],
)
def test_wrappers_exchange_as_installed(way, by_megatrons, sends, tmp_path):
    """Both ranks are on one host, where "auto" has each read for itself."""
    found = run_script(RANK, 2, way, tmp_path / "checkpoint", limit_seconds=100)
    assert found == [[[by_megatrons, sends]]] * 2


def test_an_unknown_exchange_is_refused_before_anything_is_installed():
    with pytest.raises(ArgumentError, match="exchange: must be one of 'auto', 'none', 'flat', found 'best'"):
        trackbed.megatron.install(exchange="best")
