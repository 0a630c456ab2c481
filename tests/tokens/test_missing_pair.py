"""Hints for a pair that is missing."""

from pathlib import Path

import pytest

from tests.support.files.blends import write_pair
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedDataset


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("web_text_document", "books", "book1", "book2", "book3", "code_a_document", "code_b_document"):
        write_pair(tmp_path / name, [3])
    (tmp_path / "boo.idx").touch()  # half a pair
    return tmp_path


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        ("web", "; did you mean web_text_document?"),
        ("{}/web", "; did you mean {}/web_text_document?"),
        ("code", "; did you mean code_a_document or code_b_document?"),
        ("webb_text_document", "; did you mean web_text_document?"),
        ("book4", "; did you mean books, book3 or book2?"),
        ("nothing", ""),
        ("nowhere/web", ""),
        ("s3:/bucket/key", "; pass an address as a string: Path turns s3:// into s3:/"),
        ("data/gs:/bucket/key", "; pass an address as a string: Path turns gs:// into gs:/"),
    ],
)
def test_a_missing_pair_is_told_with_pairs_that_may_be_meant(folder, prefix, hint):
    prefix, hint = prefix.format(folder), hint.format(folder)
    with pytest.raises(ArgumentError) as caught:
        IndexedDataset(prefix)
    start = f"{prefix}: a .bin and an .idx file must exist, missing {prefix}.idx and {prefix}.bin"
    assert str(caught.value) == f"{start}{hint}"


def test_an_address_that_became_a_path_is_told_so(folder):
    with pytest.raises(ArgumentError, match=r"^s3:/bucket/key: .*; pass an address as a string"):
        IndexedDataset(Path("s3://bucket/key"))
