import pytest

from trackbed.errors import ArgumentError
from trackbed.kernels.isa import LEVELS, available_levels, chosen_level


def test_the_levels_of_this_processor_begin_with_the_baseline():
    levels = available_levels()
    assert levels[0] == "baseline"
    assert levels == LEVELS[: len(levels)]


@pytest.mark.parametrize("variable", [None, ""])
def test_kernels_run_at_the_widest_level_unless_told_otherwise(monkeypatch, variable):
    monkeypatch.delenv("TRACKBED_ISA", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRACKBED_ISA", variable)
    assert LEVELS[chosen_level()] == available_levels()[-1]


def test_the_environment_names_the_level(level):
    assert LEVELS[chosen_level()] == level


@pytest.mark.parametrize("variable", ["AVX2", "sse9", "0", " baseline"])
def test_a_level_that_there_is_not_is_refused(monkeypatch, variable):
    monkeypatch.setenv("TRACKBED_ISA", variable)
    with pytest.raises(ArgumentError, match=f"TRACKBED_ISA .*baseline.*{variable!r}"):
        chosen_level()


def test_a_level_that_this_processor_lacks_is_refused(monkeypatch):
    for name in LEVELS[len(available_levels()) :]:
        monkeypatch.setenv("TRACKBED_ISA", name)
        with pytest.raises(ArgumentError, match=f"on this processor, found '{name}'"):
            chosen_level()
