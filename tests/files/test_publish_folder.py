"""Folders that appear whole under their names, or not at all."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial as bind
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.files.saved_folders import FILES, fill, is_ours, save
from tests.support.models.stepping import fail_program_at, finish, kill_program_at, log_of, start_program, steps_of
from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError
from trackbed.files import commit_folder, make_partial_folder, remove_partial

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.files.saved_folders import save
save(Path(sys.argv[2]), "new")
"""
CALLS = ("mkdir", "fsync", "rename", "renameat2", "unlink", "unlinkat", "rmdir")
"""System calls that change what other processes see, or make it last."""
MUST_TRACE = pytest.mark.skipif(shutil.which("strace") is None, reason="strace kills at a call")


def never(folder):
    return False


def content(folder):
    """Text of each file below a folder; None for each folder and what is neither."""
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def whole(version):
    return {"inner": None, "inner/deep": None, **{name: f"{version} {name.rpartition('/')[2]}" for name in FILES}}


def make_target(final, kind):
    if kind != "absent":
        final.mkdir()
    if kind == "old":
        fill(final, "old")


KINDS = {"absent": None, "empty": {}, "old": whole("old")}
"""Targets, with their content; None for none."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_takes_its_name_and_nothing_else_stays(tmp_path, kind):
    final = tmp_path / "saved"
    make_target(final, kind)
    assert save(final, "new") is (kind == "old")
    assert content(final) == whole("new")
    assert list(tmp_path.iterdir()) == [final]


def test_the_steps_may_be_made_by_several_processes(tmp_path):
    final = tmp_path / "saved"
    partial = make_partial_folder(final, may_replace=never)
    assert partial.parent == tmp_path
    assert re.fullmatch(rf"partial\.saved\.[^.]+\.{os.getpid()}\.\d+\.\d+\.partial", partial.name)
    program = f"""
import sys
from pathlib import Path
from trackbed.files import flush_files
path = Path({str(partial)!r}, sys.argv[1])
path.write_text(sys.argv[1])
flush_files([path])
"""
    for name in ("0", "1"):
        subprocess.run([sys.executable, "-c", program, name], check=True)
    assert not final.exists()
    assert commit_folder(partial, final, may_replace=never) is False
    assert content(final) == {"0": "0", "1": "1"}


def test_an_open_reader_keeps_the_earlier_files(tmp_path):
    final = tmp_path / "saved"
    save(final, "old")
    with (final / "a").open() as reader:
        save(final, "new")
        assert reader.read() == "old a"
    assert content(final) == whole("new")


def in_the_way(final, what):
    other = final.with_name("elsewhere")
    if what == "file":
        final.write_text("a file")
    if what == "pipe":
        os.mkfifo(final)
    if what == "foreign":
        final.mkdir()
        (final / "notes.txt").write_text("not ours")
    if what.startswith("link"):
        final.symlink_to(other)
    if what in ("link to a folder", "link to an earlier one"):
        other.mkdir()
    if what == "link to an earlier one":
        fill(other, "old")


@pytest.mark.parametrize(
    "what", ["file", "pipe", "foreign", "link to a folder", "link to an earlier one", "link to nothing"]
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_else_has_the_name_is_named_and_left_alone(tmp_path, what, when):
    final = tmp_path / "saved"
    partial = make_partial_folder(final, may_replace=is_ours) if when == "meanwhile" else None
    in_the_way(final, what)
    before = content(tmp_path)
    found = {"file": "a file", "pipe": "a file", "foreign": "a folder with other content"}.get(what, "a symbolic link")
    text = f"must be free, an empty folder, or an earlier one that may be replaced, found {found}: {str(final)!r}"
    step = make_partial_folder if partial is None else bind(commit_folder, partial)
    with pytest.raises(FileExistsError, match=re.escape(text)):
        step(final, may_replace=is_ours)
    assert content(tmp_path) == before


def test_an_earlier_folder_is_kept_where_the_caller_says_so(tmp_path):
    final = tmp_path / "saved"
    save(final, "old")
    with pytest.raises(FileExistsError):
        save(final, "new", may_replace=never)
    assert content(final) == whole("old")
    assert list(tmp_path.iterdir()) == [final]


def test_a_foreign_folder_that_comes_at_the_moment_of_the_exchange_is_put_back(tmp_path):
    final = tmp_path / "saved"
    save(final, "old")
    partial = make_partial_folder(final, may_replace=is_ours)
    fill(partial, "new")

    def may_replace(folder):
        if folder == final:
            final.rename(tmp_path / "moved")
            in_the_way(final, "foreign")
            return True
        return is_ours(folder)

    with pytest.raises(FileExistsError, match=f"found a folder with other content: '{final}'"):
        commit_folder(partial, final, may_replace=may_replace)
    assert content(final) == {"notes.txt": "not ours"}
    assert content(partial) == whole("new")


def test_an_error_of_the_caller_about_the_earlier_folder_is_raised(tmp_path):
    final = tmp_path / "saved"
    save(final, "old")

    def may_replace(folder):
        raise FileNotFoundError(folder / "manifest")

    with pytest.raises(FileNotFoundError, match="manifest"):
        save(final, "new", may_replace=may_replace)
    assert content(tmp_path) == {"saved": None, **{f"saved/{name}": text for name, text in whole("old").items()}}


@pytest.mark.parametrize("final", ["/", "..", "saved/..", "."])
def test_a_path_without_a_name_is_rejected(tmp_path, monkeypatch, final):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="final must end in the name of a folder, but is"):
        make_partial_folder(Path(final), may_replace=never)


def test_a_folder_is_published_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("saved"), "new")
    assert content(tmp_path / "saved") == whole("new")


def start(final, *tracing):
    return start_program(PROGRAM, [str(ROOT), str(final)], log_of(final.parent), *tracing)


def found_at(final):
    return content(final) if final.exists() else None


def steps_from(tmp_path, kind):
    """Calls of a save onto a target."""
    final = tmp_path / "counted" / "saved"
    final.parent.mkdir()
    make_target(final, kind)
    return steps_of(bind(start, final), CALLS)


@MUST_TRACE
@pytest.mark.parametrize("kind", slow_but(["old"], KINDS))
def test_a_writer_that_is_killed_at_any_call_leaves_the_old_folder_or_the_new_one(tmp_path, kind):
    steps = steps_from(tmp_path, kind)
    assert ("renameat2" if kind == "old" else "rename", 1) in steps
    # Three folders, and the parent folder: before dead ones are removed, and before and after the rename.
    assert ("fsync", len(FILES) + 6) in steps
    seen = set()
    for call, number in steps:
        final = tmp_path / f"{call}{number}" / "saved"
        final.parent.mkdir()
        make_target(final, kind)
        kill_program_at(bind(start, final), call, number)
        found = found_at(final)
        assert found in (KINDS[kind], whole("new")), (call, number)
        seen.add(found == whole("new"))
        partials = [path for path in final.parent.iterdir() if path != final]
        assert all(path.name.endswith(".partial") for path in partials)
        save(final, "next")
        assert content(final) == whole("next")
        assert list(final.parent.iterdir()) == [final]
    assert seen == {False, True}  # the target changed at one of the calls


@MUST_TRACE
@pytest.mark.parametrize("kind", slow_but(["absent"], KINDS))
def test_a_call_that_fails_is_an_error_and_leaves_the_target_whole(tmp_path, kind):
    steps = steps_from(tmp_path, kind)
    takes_name = "renameat2" if kind == "old" else "rename"
    num_fsyncs = sum(call == "fsync" for call, _ in steps)
    for call, number in steps:
        if call in ("unlink", "unlinkat", "rmdir") or (call == "mkdir" and number > 1):
            continue  # the removal of the earlier folder, which is another test, or a folder of the caller
        final = tmp_path / f"{call}{number}" / "saved"
        final.parent.mkdir()
        make_target(final, kind)
        errors = fail_program_at(bind(start, final), call, number, "ENOSPC")
        assert "OSError: [Errno 28] No space left on device" in errors
        is_after_commit = (call, number) == ("fsync", num_fsyncs)
        assert found_at(final) == (whole("new") if is_after_commit else KINDS[kind]), (call, number)
        if call == takes_name:
            assert str(final) in errors
        save(final, "next")
        assert list(final.parent.iterdir()) == [final]


@MUST_TRACE
@pytest.mark.parametrize("error", ["EINVAL", "ENOSYS"])
def test_a_file_system_that_cannot_exchange_folders_is_an_error_with_advice(tmp_path, error):
    steps_from(tmp_path, "old")
    final = tmp_path / "saved"
    fill(final, "old")
    errors = fail_program_at(bind(start, final), "renameat2", 1, error)
    assert "must be on a file system that can exchange two folders (renameat2 with RENAME_EXCHANGE)" in errors
    assert "remove the folder first, or choose another name: " + repr(str(final)) in errors
    assert content(final) == whole("old")


AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.files.saved_folders import save
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(save(Path(sys.argv[2]), "new"))
"""


@pytest.fixture
def reachable():
    """Folder that a user other than root can reach."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        for path in Path(folder).rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def save_as_nobody(final):
    command = [sys.executable, "-W", "ignore", "-c", AS_NOBODY, str(ROOT), str(final)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parent_that_may_not_be_written_to_is_an_error_and_stays_as_it_was(reachable, kind):
    final = reachable / "saved"
    make_target(final, kind)
    reachable.chmod(0o555)
    before = content(reachable)
    done = save_as_nobody(final)
    assert "PermissionError: [Errno 13] Permission denied" in done.stderr
    assert content(reachable) == before


def test_an_earlier_folder_that_cannot_be_removed_is_a_warning(reachable):
    final = reachable / "saved"
    fill(final, "old")
    (final / "inner").chmod(0o555)
    if os.geteuid() == 0:
        for path in (reachable, final, *final.rglob("*")):
            os.chown(path, 65534, 65534)
    done = save_as_nobody(final)
    assert done.stdout == "True\n", done.stderr
    assert "the earlier folder must be removed after its replacement, but: [Errno 13] Permission denied" in done.stderr
    assert content(final) == whole("new")


def read_whole(final):
    """Versions of the files that a reader sees who opens the folder once; None if it is not there."""
    try:
        folder = os.open(final, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        found = set()
        for name in FILES:
            with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=folder)) as file:
                found.add(file.read().split()[0])
    except FileNotFoundError:  # it has been replaced, and is being removed
        return None
    finally:
        os.close(folder)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_of_several_writers_at_once_one_wins_and_readers_see_whole_folders(tmp_path, kind):
    for turn in range(10):
        final = tmp_path / str(turn) / "saved"
        final.parent.mkdir()
        make_target(final, kind)
        done, seen = threading.Event(), []

        def read(final=final, done=done, seen=seen):
            while not done.is_set():
                seen.append(read_whole(final))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                replaced = list(pool.map(lambda writer, final=final: save(final, f"{writer}"), range(4)))
        finally:
            done.set()
            reader.join()
        assert sum(replaced) == (4 if kind == "old" else 3)
        assert content(final) in [whole(f"{writer}") for writer in range(4)]
        assert list(final.parent.iterdir()) == [final]
        assert all(found is None or len(found) == 1 for found in seen)


def test_a_partial_folder_that_is_not_wanted_is_removed_at_once(tmp_path):
    partial = make_partial_folder(tmp_path / "saved", may_replace=never)
    fill(partial, "new")
    remove_partial(partial)
    assert list(tmp_path.iterdir()) == []


def test_the_partial_folder_of_a_living_writer_is_left_alone(tmp_path):
    final = tmp_path / "saved"
    mine = make_partial_folder(final, may_replace=never)
    fill(mine, "mine")
    process = start(final)
    assert finish(process) == ""
    assert content(final) == whole("new")
    assert content(mine) == whole("mine")
