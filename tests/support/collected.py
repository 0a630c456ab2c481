"""Names of the tests that this run has collected."""

import pytest

COLLECTED = pytest.StashKey[set[str]]()
"""Names of all tests, also of those that are deselected."""
