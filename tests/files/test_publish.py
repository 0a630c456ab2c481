import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.processes.forked import run_in_fork
from trackbed.files import clear_dead_partials, flush_to_disk, new_partial, publish, remove_partial

# Writes a partial file or folder of the path in argv, prints its name, and waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from trackbed.files import new_partial
partial = new_partial(Path(sys.argv[1]))
if sys.argv[2] == "folder":
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "a").write_bytes(b"half")
    (partial / "link").symlink_to("/")
else:
    partial.write_bytes(b"half")
print(partial, flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["file", "folder"])
def writer(request, tmp_path):
    """Process that is writing `data.bin`, and its partial file or folder."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "data.bin"), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def start_of(pid):
    """Returns field 22 of /proc/<pid>/stat, after a name that may contain any character."""
    return int(re.search(r".*\) (.*)", Path(f"/proc/{pid}/stat").read_text())[1].split()[19])


def test_the_partial_of_a_killed_process_is_removed(writer, tmp_path):
    process, partial = writer
    process.kill()
    process.wait()
    assert clear_dead_partials(tmp_path) == [partial]
    assert list(tmp_path.iterdir()) == []


def test_the_partial_of_a_zombie_is_removed(writer, tmp_path):
    process, partial = writer
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead, but still in the process table
    assert clear_dead_partials(tmp_path) == [partial]


def test_the_partial_of_a_living_process_is_kept(writer, tmp_path):
    _, partial = writer
    before = sorted(tmp_path.rglob("*"))
    assert partial in before
    assert clear_dead_partials(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_the_partial_of_another_host_is_kept(writer, tmp_path):
    process, partial = writer
    pid_at = partial.name.index(f".{process.pid}.")
    elsewhere = partial.rename(tmp_path / f"data.bin.elsewhere{partial.name[pid_at:]}")
    process.kill()
    process.wait()
    assert clear_dead_partials(tmp_path) == []
    assert elsewhere.exists()


def test_a_process_that_reuses_the_pid_of_a_dead_one_keeps_no_partial_alive(tmp_path):
    mine = new_partial(tmp_path / "data.bin")
    start = start_of(os.getpid())
    assert f".{os.getpid()}.{start}." in mine.name
    mine.touch()
    older = tmp_path / mine.name.replace(f".{start}.", f".{start - 1}.")
    older.touch()
    assert clear_dead_partials(tmp_path) == [older]
    assert mine.exists()


def test_a_process_whose_name_looks_like_fields_of_stat_is_alive(tmp_path):
    program = tmp_path / "x) Z 1 2 3"
    shutil.copy(shutil.which("sleep"), program)
    with subprocess.Popen([program, "60"]) as process:
        while not Path(f"/proc/{process.pid}/comm").read_text().startswith("x)"):
            pass
        host = new_partial(Path("f")).name.split(".")[1]
        partial = tmp_path / f"f.{host}.{process.pid}.{start_of(process.pid)}.0.partial"
        partial.touch()
        assert clear_dead_partials(tmp_path) == []
        process.kill()
    assert clear_dead_partials(tmp_path) == [partial]


@pytest.mark.parametrize("name", ["data.bin", "a.b.1.2.3.c", "with space", "-", ".hidden", "x.partial", "ü"])
def test_only_partials_of_the_name_asked_for_are_removed(tmp_path, name):
    dead = tmp_path / new_partial(tmp_path / name).name.replace(f".{os.getpid()}.", ".4194305.")
    others = [dead.with_name(f"{prefix}{dead.name}") for prefix in ("more", "1.2.3.", "x.")]
    others.append(dead.with_name(f"{name}.idx{dead.name.removeprefix(name)}"))
    for path in (dead, *others):
        path.touch()
    assert clear_dead_partials(tmp_path, final_name=name) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert sorted(clear_dead_partials(tmp_path)) == sorted(others)


@pytest.mark.parametrize(
    "name", ["data.bin", "data.partial", "data.1.2.3.partial", "data.host.x.2.3.partial", "d.host.1.2.3.partial.old"]
)
def test_other_files_are_kept(tmp_path, name):
    (tmp_path / name).touch()
    assert clear_dead_partials(tmp_path) == []
    assert (tmp_path / name).exists()


def test_a_host_name_with_dots_is_one_word_in_the_partial_name(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.rack2.example")
    # A forked process looks up its host name anew.
    pid, name = run_in_fork(lambda: (os.getpid(), new_partial(tmp_path / "data.bin").name))
    assert re.match(rf"data\.bin\.node7-rack2-example-\d+\.{pid}\.", name)
    (tmp_path / name).touch()
    assert clear_dead_partials(tmp_path, final_name="data.bin") == [tmp_path / name]


def test_partial_names_are_unique(tmp_path):
    def names(_):
        return [new_partial(tmp_path / "data.bin") for _ in range(100)]

    with ThreadPoolExecutor(8) as pool:
        names_of_all = [name for some in pool.map(names, range(8)) for name in some]
    assert len(set(names_of_all)) == 800


def test_a_forked_process_uses_its_own_pid(tmp_path):
    pid, name = run_in_fork(lambda: (os.getpid(), new_partial(tmp_path / "data.bin").name))
    assert pid != os.getpid()
    assert f".{pid}." in name


def test_a_partial_is_beside_its_final_file_or_in_the_given_folder(tmp_path):
    assert new_partial(tmp_path / "a" / "data.bin").parent == tmp_path / "a"
    assert new_partial(tmp_path / "a" / "data.bin", directory=tmp_path).parent == tmp_path


def test_publishing_replaces_the_file_for_new_readers_only(tmp_path):
    final, partial = tmp_path / "data.bin", new_partial(tmp_path / "data.bin")
    final.write_bytes(b"old")
    partial.write_bytes(b"new")
    with final.open("rb") as reader:
        publish(partial, final)
        assert reader.read() == b"old"
    assert final.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [final]


def test_a_reader_never_sees_a_missing_or_half_written_file(tmp_path):
    final = tmp_path / "data.bin"
    final.write_bytes(bytes(1000))
    seen, done = set(), threading.Event()

    def read():
        while not done.is_set():
            seen.add(final.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(200):
        partial = new_partial(final)
        partial.write_bytes(bytes([turn]) * 1000)
        publish(partial, final)
    done.set()
    reader.join()
    assert all(content == content[:1] * 1000 for content in seen)


def test_a_link_with_the_name_of_a_partial_folder_is_removed_and_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    dead = tmp_path / new_partial(tmp_path / "data").name.replace(f".{os.getpid()}.", ".4194305.")
    dead.symlink_to(elsewhere)
    assert clear_dead_partials(tmp_path) == [dead]
    assert sorted(tmp_path.rglob("*")) == [elsewhere, elsewhere / "kept"]


def test_several_processes_may_remove_a_partial_folder_at_once(tmp_path):
    for turn in range(20):
        dead = tmp_path / f"data.host.1.2.{turn}.partial"
        for number in range(50):
            (dead / f"{number}").mkdir(parents=True)
            (dead / f"{number}" / "a").touch()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(remove_partial, [dead] * 4))
        assert list(tmp_path.iterdir()) == []


def test_files_and_folders_can_be_flushed(tmp_path):
    (tmp_path / "data.bin").touch()
    flush_to_disk(tmp_path / "data.bin")
    flush_to_disk(tmp_path)
    with pytest.raises(FileNotFoundError):
        flush_to_disk(tmp_path / "none")


LONG = ["x" * 215, "x" * 216, "x" * 255, "\u6771" * 85, "\U0001f642" * 63, os.fsdecode(b"\xff" * 255), "a." * 127]


@pytest.mark.parametrize("name", LONG, ids=range(len(LONG)))
def test_a_long_name_has_a_partial_name_that_fits(tmp_path, name):
    final, partial = tmp_path / name, new_partial(tmp_path / name)
    assert len(os.fsencode(partial.name)) <= 255
    partial.touch()
    publish(partial, final)
    assert final.exists()


@pytest.mark.parametrize("name", LONG, ids=range(len(LONG)))
def test_the_partial_of_a_long_name_is_removed_for_that_name_alone(tmp_path, name):
    dead, other = (new_partial(tmp_path / one).name for one in (name, f"{name[:-1]}-"))
    paths = [tmp_path / one.replace(f".{os.getpid()}.", f".{'9' * len(str(os.getpid()))}.") for one in (dead, other)]
    for path in paths:
        path.touch()
    assert clear_dead_partials(tmp_path, final_name=name) == paths[:1]
