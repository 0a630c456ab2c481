import pytest


@pytest.fixture
def prefix(tmp_path):
    """Prefix for a new pair in an empty folder."""
    return tmp_path / "out"
