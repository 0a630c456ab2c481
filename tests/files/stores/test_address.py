"""Addresses, and those that are refused."""

import pytest

from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address, parse_address


def test_addresses_are_told_from_paths():
    assert [is_address(name) for name in ("s3://a/b", "gs://a/b", "/a/b", "a/b", "file:///a")] == [
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://user:secret@bucket/a", "found one with a username"),
        ("https://host/a?X-Amz-Signature=secret", "found one with a query"),
        ("https://host/a#secret", "found one with a fragment"),
    ],
)
def test_what_may_be_a_secret_is_refused_without_being_repeated(text, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        parse_address(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftp://a/b", "scheme must be one of"),
        ("s3:///b", "must have the form s3://bucket/key"),
        ("s3://a/b\n", "no control characters"),
    ],
)
def test_other_addresses_are_refused(text, words):
    with pytest.raises(ArgumentError, match=words):
        parse_address(text)
