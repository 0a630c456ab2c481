"""The secret that the ranks of one user share."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from trackbed.cli.secret import SECRET_BYTES, secret_path, shared_secret
from trackbed.errors import FormatError


def test_all_who_ask_at_once_get_the_same(tmp_path):
    for number in range(20):
        path = tmp_path / str(number) / "secret"
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: shared_secret(path), range(16)))  # noqa: B023
        assert len(set(found)) == 1
        assert len(found[0]) == SECRET_BYTES
        assert [one.name for one in path.parent.iterdir()] == ["secret"]


def test_processes_get_the_same(tmp_path):
    path = tmp_path / "secret"
    with get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(shared_secret, [path] * 4))) == 1


def test_caches_have_secrets_of_their_own(tmp_path):
    assert shared_secret(tmp_path / "a") != shared_secret(tmp_path / "b")


def test_only_its_owner_may_read_it(tmp_path):
    path = secret_path(tmp_path)
    secret = shared_secret(path)
    assert path.parent == tmp_path / ".trackbed"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(FormatError, match=r"only its owner may have access to the secret, found mode 0640; remove it"):
        shared_secret(path)
    path.chmod(0o600)
    assert shared_secret(path) == secret


@pytest.mark.parametrize("content", [b"", b"\0" * 65, b"ab" * 31 + b"\n", b"ab" * 33, b"g" * 64, b"\xff" * 64])
def test_a_damaged_one_is_refused(tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(FormatError, match="a secret has 64 hexadecimal digits, found something else; remove it"):
        shared_secret(path)


def test_where_it_cannot_be_made_the_error_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        shared_secret(tmp_path / "file" / "secret")


def test_a_pipe_in_its_place_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(FormatError, match="secret: must be a regular file, found a pipe"):
        shared_secret(tmp_path / "secret")
