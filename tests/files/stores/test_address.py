"""Addresses, and those that are refused."""

import pytest

from trackbed.errors import ArgumentError
from trackbed.files.stores import endpoint_of, is_address, parse_address


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
        ("S3://a/b", "scheme must be one of .* found S3"),
        ("s3://a:80/b", "must have no port"),
        ("s3://a//b", "a key must have no empty part, and none of '.' and '..', found ''"),
        ("s3://a/b//c", "no empty part"),
        ("s3://a/b/../c", "found '..'"),
        ("file:///a/./b", "found '.'"),
    ],
)
def test_other_addresses_are_refused(text, words):
    with pytest.raises(ArgumentError, match=words):
        parse_address(text)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://user:secret@127.0.0.1:9", "found one with a user, password, query or fragment"),
        ("http://127.0.0.1:9/?secret", "found one with a user, password, query or fragment"),
        ("secret", "AWS_ENDPOINT_URL_S3 must be the URL of a server"),
        ("http://secret host", "must be the URL of a server"),
        ("http://secret:port", "must be the URL of a server"),
    ],
)
def test_an_endpoint_that_cannot_be_used_or_has_a_secret_is_refused_without_being_repeated(
    monkeypatch, endpoint, words
):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(ArgumentError, match=words) as caught:
        endpoint_of(parse_address("s3://a/b"))
    assert "secret" not in str(caught.value)


def test_folders_may_end_in_a_slash():
    assert parse_address("s3://a/b/").key == "b/"
    assert parse_address("s3://a/").key == parse_address("s3://a").key == ""
