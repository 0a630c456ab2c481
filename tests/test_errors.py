"""The tree of errors."""

import pickle

import pytest

from trackbed import errors


def drawn_tree():
    """Base class of each error, as the docstring of the module draws it."""
    found, parents = {}, {}
    for line in errors.__doc__.splitlines():
        name = line.lstrip(" |+-").partition(" ")[0]
        if name.endswith("Error"):
            depth = len(line) - len(line.lstrip(" |+-"))
            parents[depth] = name
            found[name] = parents.get(depth - 4)
    return found


def test_the_docstring_draws_every_error_below_its_base():
    tree = drawn_tree()
    assert sorted(tree) == errors.__all__
    for name, base in tree.items():
        found = getattr(errors, name).__bases__[0].__name__
        assert found == (base or found)
    assert [name for name, base in tree.items() if base is None] == ["TrackbedError"]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ArgumentError", ValueError),
        ("ArgumentError", AssertionError),
        ("GradientError", AssertionError),
        ("OversampleError", IndexError),
    ],
)
def test_code_for_megatron_core_catches_what_it_expects(name, base):
    assert issubclass(getattr(errors, name), base)


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_keeps_its_text_in_another_process(name):
    argument = ["a.toml:1: no"] if name == "BlendFileError" else "a.toml:1: no"
    error = pickle.loads(pickle.dumps(getattr(errors, name)(argument)))
    assert type(error) is getattr(errors, name)
    assert str(error) == "a.toml:1: no"
