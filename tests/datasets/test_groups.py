"""Datasets over a group of pairs, against those over the pair that `merge` makes of them."""

import pickle

import pytest

from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.errors import ArgumentError
from trackbed.tokens import merge

ARRAYS = ("document_index", "sample_index", "shuffle_index")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Prefixes of three pairs, of the same merged, and of a fourth."""
    folder = tmp_path_factory.mktemp("pairs")
    parts = write_pairs(folder)
    merge(parts, str(folder / "merged"))
    return parts, str(folder / "merged"), write_pair(folder / "other", [20] * 50, seed=9)


def both(files, cache, **options):
    """The datasets of the group, and those of the merged pair under the same configuration."""
    parts, merged, other = files
    for name, groups in (("group", {"group": parts}), (merged, None)):
        config = gpt_config(
            cache / name[-6:], blend=([name, other], [0.7, 0.3]), split="8,1,1", groups=groups, **options
        )
        yield build(config, (300, 10, 10))


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_group_gives_the_samples_of_the_merged_pair(tmp_path, files, order):
    for group, merged in zip(*both(files, tmp_path, order=order, create_cu_seqlens=True), strict=True):
        assert len(group) == len(merged)
        assert tokens_of(group, range(len(group))) == tokens_of(merged, range(len(merged)))
        for position in range(0, len(group), 7):
            assert group[position]["cu_seqlens"].tolist() == merged[position]["cu_seqlens"].tolist()
        if order != "instant":
            for name in ARRAYS:
                one, two = (getattr(dataset.datasets[0], name) for dataset in (group, merged))
                assert (one.dtype, one.tolist()) == (two.dtype, two.tolist())


def test_a_group_is_found_in_the_cache_and_by_workers(tmp_path, files):
    first = next(both(files, tmp_path))[0]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    again = next(both(files, tmp_path))[0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == before
    assert first.fingerprint == again.fingerprint
    assert tokens_of(pickle.loads(pickle.dumps(first)), range(20)) == tokens_of(again, range(20))


def test_a_group_of_other_files_under_the_same_name_gets_indices_of_its_own(tmp_path, files, caplog):
    parts = files[0]
    sizes = []
    for chosen in (parts, parts[:2]):
        config = gpt_config(tmp_path, blend=(["group"], None), split="1", groups={"group": chosen})
        dataset = build(config, (None, None, None))[0]
        sizes.append(len(dataset))
        assert len(tokens_of(dataset, range(len(dataset)))) == len(dataset)
    assert sizes[1] < sizes[0]
    assert "another fingerprint" in caplog.text or caplog.records


def test_counts_known_beforehand_do_not_go_with_groups():
    with pytest.raises(ArgumentError, match="sequences_per_dataset must be None with groups"):
        gpt_config(None, blend=(["g"], None), split="1", groups={"g": ["a"]}, sequences_per_dataset={"g": (1, 2)})
