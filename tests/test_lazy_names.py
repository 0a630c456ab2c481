import subprocess
import sys

import pytest

from trackbed import plural
from trackbed.lazy_names import lazy_attributes, lazy_names


def test_names_and_modules_are_found_where_they_are_defined():
    get_attribute, directory, exported = lazy_names(
        "trackbed", {"trackbed.plural": "number_of"}, present="__version__", modules="plural"
    )
    assert get_attribute("number_of") is plural.number_of
    assert get_attribute("plural") is plural
    assert exported == ["__version__", "number_of"]
    assert directory() == ["__version__", "number_of", "plural"]


def test_another_name_is_an_error_that_names_the_module():
    get_attribute = lazy_attributes("trackbed", {"number_of": "trackbed.plural"})
    with pytest.raises(AttributeError, match=r"module 'trackbed' has no attribute 'number_off'"):
        get_attribute("number_off")


def test_a_star_import_has_all_names_of_a_facade():
    script = "import trackbed; from trackbed import *; print(set(trackbed.__all__) <= set(globals()))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "True\n"
