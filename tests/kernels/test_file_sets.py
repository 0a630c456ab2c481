"""Tests of sets of files that are published together: each file appears complete under its name, or not at all."""

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

from trackbed.errors import ArgumentError
from trackbed.kernels import FileSetFolders, file_stamps, publish_file_sets

ENDINGS = ("-a", "-b", ".json")
COUNTS = (1, 2, 1)


@pytest.fixture(params=[True, False], ids=["unnamed", "named"])
def may_be_unnamed(request):
    return request.param


def folders_in(tmp_path):
    folders = FileSetFolders(**{name: f"{tmp_path}/{name}" for name in ("files", "claims", "partials")})
    for folder in (folders.files, folders.claims, folders.partials):
        Path(folder).mkdir(exist_ok=True)
    return folders


def parts_of(*stems):
    """Parts that contain the name of their set."""
    return [part for stem in stems for part in (stem.encode(), b"header", np.arange(5), f"{stem}!".encode())]


def publish(folders, stems, *, parts=None, may_be_unnamed=True, **options):
    return publish_file_sets(
        folders,
        stems,
        ENDINGS,
        parts_of(*stems) if parts is None else parts,
        COUNTS,
        partial_ending=".1.partial",
        may_be_unnamed=may_be_unnamed,
        **options,
    )


def content_of(folders):
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for folder in (folders.files, folders.claims, folders.partials)
        for path in Path(folder).iterdir()
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
    assert errors.tolist() == [0, 0]
    assert content_of(folders) == wanted_of("x", "y")
    places = [f"{folders.files}/{{}}-a", f"{folders.files}/{{}}-b", f"{folders.claims}/{{}}.json"]
    paths = [place.format(stem) for stem in "xy" for place in places]
    np.testing.assert_array_equal(stamps.reshape(-1, 3), file_stamps(".", paths))
    assert Path(paths[0]).stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_an_existing_file_stays_and_nothing_of_the_set_appears(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    publish(folders, ["y"])
    before = content_of(folders)
    errors, _ = publish(folders, ["x", "y", "z"], parts=parts_of("x", "other", "z"), may_be_unnamed=may_be_unnamed)
    assert errors.tolist() == [0, errno.EEXIST, 0]
    assert content_of(folders) == {**wanted_of("x", "z"), **before}


def test_existing_files_without_a_claim_are_not_replaced(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    Path(folders.files, "x-b").write_bytes(b"left by another program")
    Path(folders.files, "y-a", "in the way").mkdir(parents=True)
    errors, _ = publish(folders, ["x", "y", "z"], may_be_unnamed=may_be_unnamed)
    assert errors.tolist() == [errno.EEXIST, errno.EEXIST, 0]
    shutil.rmtree(Path(folders.files, "y-a"))
    assert content_of(folders) == {**wanted_of("z"), "files/x-b": b"left by another program"}


def test_files_created_while_a_set_is_published_are_replaced(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    stems = [f"{number:04}" for number in range(3000)]
    stopped = threading.Event()

    def come():
        while not stopped.is_set():
            for stem in stems[::7]:
                if not Path(folders.claims, f"{stem}.json").exists():
                    with contextlib.suppress(FileExistsError), Path(folders.files, f"{stem}-b").open("xb"):
                        pass

    rival = threading.Thread(target=come)
    rival.start()
    try:
        errors, _ = publish(folders, stems, may_be_unnamed=may_be_unnamed)
    finally:
        stopped.set()
        rival.join()
    assert set(errors.tolist()) <= {0, errno.EEXIST}
    found = content_of(folders)
    appeared = [stem for stem, error in zip(stems, errors.tolist(), strict=True) if error == 0]
    assert len(appeared) > 2500
    for stem in appeared:
        mine = {name: found.pop(name) for name in wanted_of(stem)}
        # The rival may have checked for the claim before it existed, and created its file after ours.
        assert mine == wanted_of(stem)
    assert set(found) <= {f"files/{stem}-b" for stem in stems[::7]}


@pytest.mark.parametrize("absent", ["files", "claims", "partials"])
def test_a_missing_folder_is_an_error_of_every_set(tmp_path, may_be_unnamed, absent):
    folders = folders_in(tmp_path)
    (tmp_path / absent).rmdir()
    errors, _ = publish(folders, ["x", "y"], may_be_unnamed=may_be_unnamed)
    assert errors.tolist() == [errno.ENOENT] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_set_that_is_too_large_leaves_nothing_behind(tmp_path, may_be_unnamed):
    folders = folders_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        large = [b"l", b"header", bytes(2000), b"l!"]
        errors, _ = publish(folders, ["l", "x"], parts=[*large, *parts_of("x")], may_be_unnamed=may_be_unnamed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert errors.tolist() == [errno.EFBIG, 0]
    assert content_of(folders) == wanted_of("x")


def test_the_poll_can_end_it_between_sets_and_no_partial_file_stays(tmp_path, may_be_unnamed):
    class EndedError(Exception):
        pass

    polls = []

    def end(_done):
        polls.append(1)
        if len(polls) == 3:
            raise EndedError

    folders = folders_in(tmp_path)
    stems = [f"{number:05}" for number in range(20_000)]
    with pytest.raises(EndedError):
        publish(folders, stems, may_be_unnamed=may_be_unnamed, poll=end)
    done = len(list(Path(folders.claims).iterdir()))
    assert 0 < done < len(stems)
    assert content_of(folders) == wanted_of(*stems[:done])


LIMITED = """
import resource, sys
sys.path[:0] = sys.argv[2:]
from test_file_sets import folders_in, publish
folders = folders_in(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
assert publish(folders, [str(number) for number in range(200)])[0].tolist() == [0] * 200
"""


def test_many_sets_take_few_descriptors(tmp_path):
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", LIMITED, tmp_path, here, here.parent], check=True)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=7))
def test_a_file_may_have_any_number_of_parts(tmp_path_factory, parts):
    folder = f"{tmp_path_factory.mktemp('parts')}"
    folders = FileSetFolders(folder, folder, folder)
    errors, _ = publish_file_sets(folders, ["x"], [".a"], parts, [len(parts)], partial_ending=".partial")
    assert errors.tolist() == [0]
    assert Path(folder, "x.a").read_bytes() == b"".join(parts)


def test_the_number_of_parts_must_match_the_counts(tmp_path):
    with pytest.raises(ArgumentError, match=r"1 sets of 3 files must have \[1, 2, 1\] parts each, found 1 in all"):
        publish(folders_in(tmp_path), ["x"], parts=[b"x"])
    with pytest.raises(ArgumentError, match="must not be empty"):
        publish(folders_in(tmp_path), [""])
    folders = folders_in(tmp_path)
    for endings, counts, parts in (([".a", ".b"], [3, -1], [b"x"] * 2), ([], [], []), ([".a"], [1, 0], [b"x"])):
        with pytest.raises(ArgumentError, match="parts each, found"):
            publish_file_sets(folders, ["x"], endings, parts, counts, partial_ending=".partial")
    assert publish_file_sets(folders, ["x"], [".a"], (b"x",), [1], partial_ending=".partial")[0].tolist() == [0]


def test_no_set_is_no_work(tmp_path):
    errors, stamps = publish(folders_in(tmp_path), [])
    assert errors.shape == (0,)
    assert stamps.shape == (0, 3, 3)
