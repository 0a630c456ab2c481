"""The page of versions says what `make test-versions` has found."""

import json

import pytest

from tests.versions.environments import ENVIRONMENTS
from tests.versions.page import RESULTS, ROOT, rows


@pytest.mark.skipif(not RESULTS.exists(), reason="make test-versions has not been run")
def test_the_page_has_the_table_of_the_results():
    results = json.loads(RESULTS.read_text())
    assert set(results) <= {one.name for one in ENVIRONMENTS}
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    assert "\n".join(rows(results)) in page
    for name, found in results.items():
        for failed in found["failed"]:
            assert failed.rpartition("::")[2].partition("[")[0] in page, f"{name}: {failed} is not explained"
