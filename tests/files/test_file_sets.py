"""Sets of files that appear together: each whole, under its name, or not at all."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ROOT
from trackbed.cancellation import polling
from trackbed.errors import ArgumentError
from trackbed.files import Claim, FileSet, NewFile, commit_file_sets, read_stamps

ENDINGS = ("files/{}-a", "files/{}-b", "claims/{}.json")


@pytest.fixture(params=[True, False], ids=["unnamed", "named"])
def may_be_unnamed(request):
    return request.param


def folders_in(tmp_path):
    for name in ("files", "claims", "partials"):
        (Path(tmp_path) / name).mkdir(exist_ok=True)
    return Path(tmp_path)


def parts_of(stem):
    """Parts of each file, that say whose they are."""
    return [[stem.encode()], [b"header", np.arange(5)], [f"{stem}!".encode()]]


def set_of(folders, stem, *, parts=None, claim=Claim.take):
    paths = [ending.format(stem) for ending in ENDINGS]
    partials = [f"{folders}/partials/{path.rpartition('/')[2]}.1.partial" for path in paths]
    files = zip((f"{folders}/{path}" for path in paths), partials, parts or parts_of(stem), strict=True)
    return FileSet([NewFile(*file) for file in files], claim)


def publish(folders, stems, *, parts=None, claim=Claim.take, **options):
    """Commit sets; `parts` has those that are not `parts_of`. Returns the errors, and the stamps."""
    sets = [set_of(folders, stem, parts=(parts or {}).get(stem), claim=claim) for stem in stems]
    return commit_file_sets(sets, **options)


def content_of(folders):
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for folder in ("files", "claims", "partials")
        for path in (folders / folder).iterdir()
    }


def wanted_of(*stems):
    found = {}
    for stem in stems:
        found[f"files/{stem}-a"] = stem.encode()
        found[f"files/{stem}-b"] = b"header" + np.arange(5).tobytes()
        found[f"claims/{stem}.json"] = f"{stem}!".encode()
    return found


def test_files_appear_under_their_names(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    errors, stamps = publish(folders, ["x", "y"], may_be_unnamed=may_be_unnamed)
    assert errors == [0, 0]
    assert content_of(folders) == wanted_of("x", "y")
    paths = [f"{folders}/{ending.format(stem)}" for stem in "xy" for ending in ENDINGS]
    np.testing.assert_array_equal(np.concatenate(stamps), read_stamps(paths))
    assert Path(paths[0]).stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_a_name_that_is_taken_stays_and_nothing_of_the_set_appears(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    publish(folders, ["y"])
    before = content_of(folders)
    errors, _ = publish(folders, ["x", "y", "z"], parts={"y": parts_of("other")}, may_be_unnamed=may_be_unnamed)
    assert errors == [0, errno.EEXIST, 0]
    assert content_of(folders) == {**wanted_of("x", "z"), **before}


def test_files_without_a_claim_are_replaced(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    Path(folders, "files", "x-b").write_bytes(b"what was left")
    errors, _ = publish(folders, ["x", "z"], may_be_unnamed=may_be_unnamed)
    assert errors == [0, 0]
    assert content_of(folders) == wanted_of("x", "z")


def test_where_the_system_fails_after_the_claim_that_stays(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    Path(folders, "files", "y-a", "in the way").mkdir(parents=True)
    errors, _ = publish(folders, ["x", "y", "z"], may_be_unnamed=may_be_unnamed)
    assert errors == [0, errno.EISDIR, 0]
    shutil.rmtree(Path(folders, "files", "y-a"))
    assert content_of(folders) == {**wanted_of("x", "z"), "claims/y.json": b"y!"}


def test_a_claim_that_is_replaced_appears_in_place_of_the_old_one(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    publish(folders, ["x"], parts={"x": parts_of("old")})
    errors, _ = publish(folders, ["x"], claim=Claim.replace, may_be_unnamed=may_be_unnamed)
    assert errors == [0]
    assert content_of(folders) == wanted_of("x")


@pytest.mark.parametrize("is_integer", [True, False])
def test_a_set_without_a_claim_of_its_own_completes_what_is_there(tmp_path, may_be_unnamed, is_integer):
    folders = folders_in(tmp_path)
    publish(folders, ["x"], parts={"x": parts_of("o")})
    if not is_integer:
        Path(folders, "files", "x-b").write_bytes(b"cut")
    errors, _ = publish(folders, ["x"], claim=Claim.none, may_be_unnamed=may_be_unnamed)
    assert errors == [errno.EALREADY if is_integer else 0]
    files = {"files/x-a": b"o"} if is_integer else {}
    assert content_of(folders) == {**wanted_of("x"), "claims/x.json": b"o!", **files}


def test_a_file_that_is_complete_already_is_taken_and_left_where_the_set_does_not_appear(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    for stem in "xy":
        Path(folders, "partials", f"{stem}-a.1.partial").write_bytes(b"complete")
    Path(folders, "claims", "y.json").write_bytes(b"taken")
    parts = {stem: [None, *parts_of(stem)[1:]] for stem in "xy"}
    errors, _ = publish(folders, ["x", "y"], parts=parts, may_be_unnamed=may_be_unnamed)
    assert errors == [0, errno.EEXIST]
    left = {"partials/y-a.1.partial": b"complete", "claims/y.json": b"taken"}
    assert content_of(folders) == {**wanted_of("x"), "files/x-a": b"complete", **left}


def test_files_that_come_while_a_set_appears_are_replaced(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    stems = [f"{number:04}" for number in range(3000)]
    stopped = threading.Event()

    def come():
        while not stopped.is_set():
            for stem in stems[::7]:
                if not Path(folders, "claims", f"{stem}.json").exists():
                    with contextlib.suppress(FileExistsError), Path(folders, "files", f"{stem}-b").open("xb"):
                        pass

    rival = threading.Thread(target=come)
    rival.start()
    try:
        errors, _ = publish(folders, stems, may_be_unnamed=may_be_unnamed)
    finally:
        stopped.set()
        rival.join()
    assert set(errors) == {0}
    assert content_of(folders) == wanted_of(*stems)


@pytest.mark.parametrize("absent", [("files", "partials"), ("claims", "partials"), ("files", "claims", "partials")])
def test_a_folder_that_is_not_there_is_an_error_of_every_set(tmp_path, may_be_unnamed, absent):
    folders = folders_in(tmp_path)
    for name in absent:
        (tmp_path / name).rmdir()
    errors, _ = publish(folders, ["x", "y"], may_be_unnamed=may_be_unnamed)
    assert errors == [errno.ENOENT] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_is_too_large_leaves_nothing_behind(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        large = {"l": [[b"l"], [b"header", bytes(2000)], [b"l!"]]}
        errors, _ = publish(folders, ["l", "x"], parts=large, may_be_unnamed=may_be_unnamed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert errors == [errno.EFBIG, 0]
    assert content_of(folders) == wanted_of("x")


def test_what_looks_in_ends_it_between_sets_and_nothing_partial_stays(tmp_path, may_be_unnamed):
    class EndedError(Exception):
        pass

    looks = []

    def end(_done):
        looks.append(1)
        if len(looks) == 3:
            raise EndedError

    folders = folders_in(tmp_path)
    stems = [f"{number:05}" for number in range(20_000)]
    with polling(end), pytest.raises(EndedError):
        publish(folders, stems, may_be_unnamed=may_be_unnamed)
    done = len(list((folders / "claims").iterdir()))
    assert 0 < done < len(stems)
    assert content_of(folders) == wanted_of(*stems[:done])


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from tests.files.test_file_sets import folders_in, publish
folders = folders_in(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
assert publish(folders, [str(number) for number in range(200)])[0] == [0] * 200
"""


def test_many_sets_take_few_descriptors(tmp_path):
    subprocess.run([sys.executable, "-c", LIMITED, tmp_path, ROOT], check=True)


@given(st.lists(st.binary(max_size=40), max_size=7))
def test_a_file_may_have_any_number_of_parts(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("parts")
    one = FileSet([NewFile(f"{folder}/x", f"{folder}/x.partial", parts)], Claim.take)
    assert commit_file_sets([one])[0] == [0]
    assert (folder / "x").read_bytes() == b"".join(parts)


def test_what_is_not_bytes_in_a_row_is_refused(tmp_path, may_be_unnamed):
    for part, error in ((memoryview(b"abcdef")[::2], BufferError), ("text", TypeError)):
        with pytest.raises(error):
            publish(folders_in(tmp_path), ["x"], parts={"x": [[part]] * 3}, may_be_unnamed=may_be_unnamed)
    with pytest.raises(ArgumentError, match="must not be empty"):
        commit_file_sets([FileSet([NewFile("", "x", [])], Claim.take)])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_no_set_is_no_work():
    assert commit_file_sets([]) == ([], [])
