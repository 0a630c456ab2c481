from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.built_pair import names_in
from tests.support.files.indexed_pair import Pair
from tests.support.tiers import with_files
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, merge, verify_content


@st.composite
def pairs(draw):
    """Lengths and borders of one to four pairs, some of them empty."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(0, 4), max_size=5))
        inner = draw(st.lists(st.integers(0, len(lengths)), max_size=3)) if lengths else []
        found.append((lengths, [0, *sorted(inner), len(lengths)] if lengths else [0]))
    return found


@with_files
@given(shapes=pairs())
def test_a_merged_pair_has_the_documents_of_all_in_order(tmp_path, shapes):
    parts = []
    for number, (lengths, borders) in enumerate(shapes):
        tokens = [100 * number + at for at in range(sum(lengths))]
        part = Pair(tmp_path / f"part{number}", lengths=lengths, borders=borders, tokens=tokens)
        for path in (part.bin, part.idx):
            path.unlink(missing_ok=True)
        parts.append(part.write())
    merge([str(part.prefix) for part in parts], str(tmp_path / "all"))
    merged = IndexedDataset(str(tmp_path / "all"))
    assert [tokens.tolist() for tokens in merged[:]] == [s for part in parts for s in part.sequences()]
    sizes = [after - before for part in parts for before, after in pairwise(part.borders)]
    borders = merged.document_indices.tolist()
    assert borders[0] == 0
    assert [after - before for before, after in pairwise(borders)] == sizes
    verify_content(str(tmp_path / "all"))


def test_modes_are_merged_where_asked_for(tmp_path, pair):
    modal = replace(pair, modes=[1, 0, -1]).write()
    merge([str(modal.prefix)] * 2, str(tmp_path / "all"), multimodal=True)
    assert IndexedDataset(str(tmp_path / "all"), multimodal=True).sequence_modes.tolist() == [1, 0, -1] * 2


def test_progress_is_reported_in_bytes_of_each_pair(tmp_path, pair):
    longer = replace(pair, prefix=tmp_path / "longer", lengths=[5, 0, 2], tokens=list(range(7))).write()
    seen = []
    merge([str(pair.prefix), str(longer.prefix)], str(tmp_path / "all"), progress=seen.append)
    assert seen == [20, 28]


def test_a_pair_can_be_merged_over_itself(tmp_path, pair):
    merge([str(pair.prefix)] * 2, str(pair.prefix))
    assert [tokens.tolist() for tokens in IndexedDataset(str(pair.prefix))[:]] == pair.sequences() * 2
    assert names_in(tmp_path) == ["corpus.bin", "corpus.idx", "corpus.trackbed.json"]


def test_nothing_cannot_be_merged(tmp_path):
    with pytest.raises(ArgumentError, match="path_prefixes must name at least one pair, found none"):
        merge([], str(tmp_path / "all"))
    assert names_in(tmp_path) == []


def test_pairs_of_different_types_are_not_merged(tmp_path, pair):
    other = replace(pair, prefix=tmp_path / "other", dtype="int64").write()
    with pytest.raises(ArgumentError, match=r"other.* must be int32 .*found int64"):
        merge([str(pair.prefix), str(other.prefix)], str(tmp_path / "all"))
    assert names_in(tmp_path) == ["corpus.bin", "corpus.idx", "other.bin", "other.idx"]


@pytest.mark.parametrize(
    "changes", [{"tokens": [1]}, {"lengths": [6, -3, 2]}, {"borders": [0, 4, 3]}, {"magic": bytes(9)}]
)
@pytest.mark.parametrize("order", [1, -1])
def test_a_damaged_pair_ends_the_merge_and_leaves_nothing(tmp_path, pair, changes, order):
    damaged = replace(pair, prefix=tmp_path / "damaged", **changes).write()
    earlier = Pair(tmp_path / "all", lengths=[1], borders=[0, 1], tokens=[7]).write()
    with pytest.raises(FormatError, match="damaged"):
        merge([str(p.prefix) for p in (pair, damaged)][::order], str(tmp_path / "all"))
    assert names_in(tmp_path) == ["all.bin", "all.idx", "corpus.bin", "corpus.idx", "damaged.bin", "damaged.idx"]
    assert IndexedDataset(str(earlier.prefix))[0].tolist() == [7]


def test_a_missing_pair_ends_the_merge_and_leaves_nothing(tmp_path, pair):
    with pytest.raises(FileNotFoundError, match="none"):
        merge([str(pair.prefix), str(tmp_path / "none")], str(tmp_path / "all"))
    assert names_in(tmp_path) == ["corpus.bin", "corpus.idx"]


def test_a_merge_that_is_interrupted_leaves_nothing(tmp_path, pair):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([str(pair.prefix)], str(tmp_path / "all"), progress=interrupt)
    assert names_in(tmp_path) == ["corpus.bin", "corpus.idx"]
