"""The blend of the tests of runs, for recorded runs to report."""

from tests.ledger.conftest import folder  # noqa: F401  a fixture
