"""The import finder, on a table and packages that the tests write."""

import sys
from importlib import import_module
from unittest import mock

import pytest

from trackbed.megatron.finder import Finder

SOURCE = """
def collective():
    return "ours"

def reduce():
    return collective()
"""
ROWS = {
    "part": {"reduce": "made_up_source:reduce"},
    "part.buffer": {"collective": "made_up_source:collective", "reduce": "made_up_source:reduce"},
}
OWN = {
    "__init__.py": "",
    "core/__init__.py": "",
    "core/part/__init__.py": "from made_up.core.part.buffer import reduce\nkind = 'own package'",
    "core/part/buffer.py": "def reduce():\n    return 'theirs'\n\nlimit = 3\n\ndef read_limit():\n    return limit",
}


@pytest.fixture
def find(tmp_path, monkeypatch):
    """Puts a table below `made_up.core`, ahead of the package `made_up` of the given files."""

    def install(*, files=(), modules=ROWS):
        (tmp_path / "made_up_source.py").write_text(SOURCE)
        for path, text in dict(files).items():
            (tmp_path / "made_up" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "made_up" / path).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "meta_path", [Finder("made_up.core", modules), *sys.meta_path])

    yield install
    for name in [name for name in sys.modules if name.startswith("made_up")]:
        del sys.modules[name]


@pytest.mark.parametrize("files", [{}, OWN], ids=["without own modules", "with own modules"])
def test_a_replacement_reaches_the_implementation_and_is_undone(find, files):
    find(files=files)
    buffer, source = import_module("made_up.core.part.buffer"), import_module("made_up_source")
    original = source.collective
    with mock.patch("made_up.core.part.buffer.collective", return_value="mocked") as replaced:
        assert source.collective is buffer.collective is replaced
        assert buffer.reduce() == "mocked"
    assert replaced.called
    assert source.collective is buffer.collective is original
    assert buffer.reduce() == "ours"


def test_an_assignment_in_the_implementation_is_read_through_the_path(find, monkeypatch):
    find()
    buffer, source = import_module("made_up.core.part.buffer"), import_module("made_up_source")
    monkeypatch.setattr(source, "collective", len)
    assert buffer.collective is len


def test_a_deleted_name_is_gone_in_both_modules(find):
    find()
    buffer, source = import_module("made_up.core.part.buffer"), import_module("made_up_source")
    del buffer.collective
    assert not hasattr(buffer, "collective")
    assert not hasattr(source, "collective")
    with pytest.raises(AttributeError):
        del buffer.collective


def test_a_name_outside_the_table_is_read_from_the_own_module_and_assigned_here(find):
    find(files=OWN)
    buffer = import_module("made_up.core.part.buffer")
    assert buffer.limit == 3
    with mock.patch.object(buffer, "limit", 5):
        assert buffer.limit == 5
        assert buffer.read_limit() == 3
    assert buffer.limit == 3
    buffer.new = 1
    del buffer.new
    with pytest.raises(AttributeError, match="has no attribute 'new'"):
        del buffer.new


def test_the_own_module_is_executed_when_its_first_name_is_read(find):
    find(files={**OWN, "core/part/buffer.py": "import made_up_trace"})
    buffer = import_module("made_up.core.part.buffer")
    assert buffer.reduce() == "ours"
    with pytest.raises(ModuleNotFoundError, match="made_up_trace"):
        _ = buffer.limit


def test_names_of_the_table_are_listed(find):
    find()
    buffer = import_module("made_up.core.part.buffer")
    assert {"__name__", "collective", "reduce"} <= set(dir(buffer))
    named = {}
    exec("from made_up.core.part.buffer import *", named)
    assert named["collective"] is buffer.collective


@pytest.mark.parametrize("target", ["made_up_source:nonsense", "made_up_nowhere:reduce"])
def test_a_missing_implementation_is_an_error_of_the_import(find, target):
    find(modules={"part.buffer": {"reduce": target}})
    with pytest.raises((AttributeError, ModuleNotFoundError), match=r"nonsense|made_up_nowhere"):
        import_module("made_up.core.part.buffer")
    assert "made_up.core.part.buffer" not in sys.modules


def test_a_package_of_the_table_has_names_and_modules(find):
    find()
    package = import_module("made_up.core.part")
    assert package.reduce() == "ours"
    assert import_module("made_up.core.part.buffer") is package.buffer
    with mock.patch("made_up.core.part.buffer.collective", return_value="mocked"):
        assert package.reduce() == "mocked"


def test_an_own_package_is_kept_and_imports_the_modules_of_the_table(find):
    find(files=OWN)
    package = import_module("made_up.core.part")
    assert package.kind == "own package"
    assert package.reduce() == "ours"
