"""However many ranks build, and whichever of them want datasets: the same files, and the same samples."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.generated import builder_of, built, configurations, files_in
from tests.support.files.tidy import remove_folder
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError


def check_equal(case, folder, wanting):
    """One process, then so many ranks as `wanting` has answers, then again from what these built."""
    remove_folder(folder)
    case.write(folder / "data")
    alone = built(builder_of(case, folder / "data", folder / "alone"))

    def work(group):
        wants = wanting[group.rank]
        return built(builder_of(case, folder / "data", folder / "cache", wants=wants, group=group))

    for _ in range(2):
        found = run_ranks(len(wanting), work, timeout_seconds=30)
        if isinstance(alone, Exception):
            check_refused(alone, found)
        else:
            assert found == [alone if wants else [None] * 3 for wants in wanting]
            assert files_in(folder / "cache") == files_in(folder / "alone")


def check_refused(alone, found):
    """Every rank raises the same error: of the type that one process raised, with the rank that raised it.

    Of two datasets that cannot be built, ranks may find the other first, because they share the tasks by cost.
    """
    assert all(isinstance(error, CollectiveError) for error in found), found
    assert len({str(error) for error in found}) == 1
    ranks = r"rank \d+((, rank \d+)* and rank \d+)?"  # several may find the same before one has told the others
    assert re.match(rf"building the indices: {ranks}: {type(alone).__name__}: ", str(found[0])), (found[0], alone)


@given(case=configurations(), wanting=st.lists(st.booleans(), min_size=2, max_size=8).filter(any))
def test_ranks_build_what_one_process_builds(case, wanting, tmp_path):
    check_equal(case, tmp_path / "case", wanting)
