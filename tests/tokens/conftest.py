import pytest


@pytest.fixture
def prefix(tmp_path):
    """Where a pair may be written: the only thing in its folder."""
    return tmp_path / "out"
