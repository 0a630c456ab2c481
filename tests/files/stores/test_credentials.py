"""Credentials and endpoints: where they come from, and that they are not shown."""

import json
import sys

import pytest

from tests.support.stores.servers import ACCESS_KEY, SECRET_KEY, Proxy
from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores import ObjectRange, ObjectStamp, fetch, parse_address, stamp_of_object
from trackbed.files.stores.address import redact


@pytest.fixture
def a(bucket, monkeypatch):
    """An object, in an environment without credentials."""
    address = bucket.put("a", b"12345")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return address


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes a profile of the files of AWS's tools."""

    def write(profile, key):
        (tmp_path / "credentials").write_text(
            f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    return write


@pytest.fixture
def without_boto3(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)


@pytest.fixture
def signers(bucket, monkeypatch):
    """Access keys that signed the requests."""
    proxy, found = Proxy(bucket.endpoint), []
    proxy.look = lambda headers: found.append(headers["Authorization"].split("Credential=")[1].split("/")[0])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    yield found
    proxy.close()


@pytest.mark.parametrize(("profile", "variable"), [("default", None), ("team", "team")])
def test_profiles_are_used(profile, variable, a, files, signers, monkeypatch):
    files(profile, "key-of-a-profile")
    if variable:
        monkeypatch.setenv("AWS_PROFILE", variable)
    assert stamp_of_object(a).size_bytes == 5
    assert set(signers) == {"key-of-a-profile"}


def test_the_environment_is_used_without_a_profile(a, files, signers, monkeypatch):
    files("default", "key-of-a-profile")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    stamp_of_object(a)
    assert set(signers) == {ACCESS_KEY}


def test_credentials_that_change_are_used_at_once(a, signers, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    for key in ("first-key", "second-key"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        stamp_of_object(a)
    assert signers == ["first-key", "second-key"]


def test_a_profile_without_boto3_is_an_error_that_says_so(a, files, without_boto3, monkeypatch):
    files("team", "key-of-a-profile")
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(ArgumentError, match="/a: boto3 must be installed to use AWS_PROFILE: pip install boto3"):
        stamp_of_object(a)


def test_a_profile_that_is_not_there_is_an_error(a, files, monkeypatch):
    files("team", "key-of-a-profile")
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(ArgumentError, match="AWS_PROFILE must name a profile with credentials, found 'other'"):
        stamp_of_object(a)


def test_google_credentials_of_another_type_need_google_auth(tmp_path, monkeypatch):
    (tmp_path / "account.json").write_text(json.dumps({"type": "external_account", "token": "a-secret-token"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.setitem(sys.modules, "google.auth", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.google", raising=False)
    with pytest.raises(ArgumentError, match=r"gs://b/a: google-auth must be installed for .* 'external_account'"):
        stamp_of_object(parse_address("gs://b/a"))


@pytest.mark.parametrize(
    ("variables", "used"),
    [
        (("AWS_ENDPOINT",), "AWS_ENDPOINT"),
        (("AWS_ENDPOINT", "AWS_ENDPOINT_URL"), "AWS_ENDPOINT_URL"),
        (("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), "AWS_ENDPOINT_URL_S3"),
    ],
)
def test_the_endpoint_for_s3_wins(variables, used, bucket, monkeypatch):
    address = bucket.put("a", b"12345")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for name in variables:
        monkeypatch.setenv(name, bucket.endpoint if name == used else "http://127.0.0.1:9")
    assert stamp_of_object(address).size_bytes == 5


def test_an_object_without_an_endpoint_is_not_one_of_the_server(a, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "0.4")
    with pytest.raises(StoreError, match=r"s3://.*/a: the store must answer in time"):
        fetch([ObjectRange(a, ObjectStamp(5, '"x"'), 0, 5)])


def test_settings_that_open_no_bucket_are_an_error_without_secrets(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64: a-secret-key")
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "1")
    with pytest.raises((ArgumentError, StoreError), match="az://container/a: ") as caught:
        stamp_of_object(parse_address("az://container/a"))
    assert "a-secret-key" not in str(caught.value)


def test_a_signed_url_of_azure_is_not_shown(bucket, monkeypatch):
    """Azure's signatures are in the query of a URL, which obstore's errors repeat."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=2022-11-02&sig=a-secret-signature")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", bucket.endpoint)
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "0.5")
    proxy = Proxy(bucket.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", proxy.url)
    for fault in (403, 500, "reset"):
        proxy.faults[:] = [fault] * 20
        with pytest.raises(StoreError, match="az://container/a: the store must") as caught:
            stamp_of_object(parse_address("az://container/a"))
        assert "a-secret-signature" not in repr(caught.value)
        assert "sig" not in str(caught.value)
    proxy.close()


def test_texts_lose_their_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "IQoJb3JpZ2luX2Vj")
    text = 'GET "https://user:pw@host/a/b?X-Amz-Signature=abc&x=1": IQoJb3JpZ2luX2Vj was refused'
    assert redact(text) == 'GET "https://host/a/b?...": $AWS_SESSION_TOKEN was refused'
