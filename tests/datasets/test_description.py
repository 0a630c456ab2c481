import json
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from trackbed.datasets.megatron import describe

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Described:
    def __init__(self, unique_identifiers):
        self.unique_identifiers = unique_identifiers


@given(st.dictionaries(st.text(), VALUES | st.builds(Described, VALUES), max_size=6))
def test_a_description_is_indented_json(identifiers):
    wanted = json.dumps(OrderedDict(identifiers), indent=4, default=lambda value: value.unique_identifiers)
    assert describe(identifiers.items()) == wanted
