"""A rank of the same host whose process has ended is named within two seconds, with one next step."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.comm.ended_rank import WAYS
from tests.support.processes.launching import run_script
from tests.support.tiers import slow_but
from trackbed.comm import processes
from trackbed.comm.outcomes import describe_ended
from trackbed.comm.processes import Peers
from trackbed.comm.store import MemoryStore, StoreTampered


@pytest.mark.parametrize("way", slow_but(["another group", "gathered", "arrived", "backward", "torch backward"], WAYS))
def test_a_rank_that_is_gone_is_named_in_every_kind_of_wait(way, tmp_path):
    found = run_script(
        Path(__file__).with_name("ended_rank.py"), 3, way, "killed", tmp_path / "checkpoint", gone=2, limit_seconds=50
    )
    before = {"gathered": 1.5, "arrived": 2.3, "counted": 2.6}.get(way, 0.3)
    for ((error, seconds),) in found:
        assert re.search(r"rank 2 has ended \(process \d+ of this host is gone\): its log, or the kernel's", error)
        assert seconds < before + 2 + 1.5  # of a busy machine
    assert not (tmp_path / "checkpoint").exists()


def test_a_rank_that_ends_without_an_error_is_named_too():
    found = run_script(Path(__file__).with_name("ended_rank.py"), 2, "barrier", "exit", gone=1, limit_seconds=50)
    (((error, seconds),),) = found
    assert "rank 1 has ended" in error
    assert seconds < 4


def test_the_process_of_the_store_waits_for_the_last_reader_though_another_one_has_read_and_ended():
    found = run_script(Path(__file__).with_name("late_reader_rank.py"), 3, limit_seconds=50)
    assert found == [["left"]] * 3


def announced(store, rank, process, start=None):
    """Announces a process in the name of a rank."""
    from trackbed.comm import processes

    host = processes._host()
    number = store.add(f"{host}/count", 1)
    start = processes._start_of(process) if start is None else start
    store.set(f"{host}/{number}", f"[{rank},{process},{start}]".encode())


def sleeping():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_processes_are_seen_to_end_also_before_their_parent_asks():
    store, own = MemoryStore(), Peers(0)
    own.announce(store)
    processes = {rank: sleeping() for rank in (1, 2, 3)}
    for rank, process in processes.items():
        announced(store, rank, process.pid)
    own.meet(store)
    assert own.ended() == {}
    processes[2].kill()
    deadline = time.monotonic() + 5
    while not own.ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own.ended() == {2: processes[2].pid}
    for process in processes.values():
        process.kill()
        process.wait()
    deadline = time.monotonic() + 5
    while len(own.ended()) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own.ended() == {rank: process.pid for rank, process in processes.items()}


def test_a_process_whose_connections_are_closed_has_a_second_to_end():
    store, own, other = MemoryStore(), Peers(0), sleeping()
    announced(store, 1, other.pid)
    own.meet(store)
    began = time.monotonic()
    assert own.ended(wait_for=2) == {}
    assert time.monotonic() - began < 0.5
    assert own.ended(wait_for=1) == {}
    assert 0.9 < time.monotonic() - began < 2
    threading.Timer(0.2, other.kill).start()
    assert own.ended(wait_for=1) == {1: other.pid}
    other.wait()


def test_a_process_that_is_gone_or_replaced_when_it_is_opened_has_ended():
    store, own = MemoryStore(), Peers(0)
    gone, alive = sleeping(), sleeping()
    announced(store, 1, gone.pid)
    gone.kill()
    gone.wait()
    announced(store, 2, alive.pid, start=1)  # another process has its number now
    own.meet(store)
    assert own.ended() == {1: gone.pid, 2: alive.pid}
    alive.kill()
    alive.wait()


def test_a_rank_that_can_open_no_file_takes_no_other_for_ended(monkeypatch):
    store, own, other = MemoryStore(), Peers(0), sleeping()
    announced(store, 1, other.pid)
    monkeypatch.setattr(processes, "_start_of", lambda process: processes._UNKNOWN)
    own.meet(store)
    assert own.ended() == {}
    Peers(2).announce(store)  # nothing, rather than a time at which no process began
    later = Peers(3)
    later.meet(store)
    assert list(later.known) == [1]
    other.kill()
    other.wait()


def test_ranks_in_this_process_and_on_other_hosts_are_not_watched(monkeypatch):
    store, own = MemoryStore(), Peers(0)
    announced(store, 1, os.getpid())
    monkeypatch.setattr("trackbed.comm.processes._host", lambda: "host/other/1")
    store.set("host/other/1/1", b"[2,1,0]")
    own.meet(store)
    assert own.ended() == {}
    assert own._descriptors == {}
    monkeypatch.setattr("trackbed.comm.processes._host", lambda: None)
    Peers(3).announce(store)
    Peers(3).meet(store)


def test_a_system_without_such_descriptors_leaves_the_timeout(monkeypatch):
    store, own, other = MemoryStore(), Peers(0), sleeping()
    announced(store, 1, other.pid)

    def refuse(process):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    own.meet(store)
    other.kill()
    other.wait()
    assert own.ended() == {}


@pytest.mark.parametrize("content", [b"", b"7", b"[1,2]", b'[1,"2",3]', b"[1,-2,3]", b"[1,true,3]", b"\xff"])
def test_entries_that_no_rank_wrote_are_refused(content):
    store = MemoryStore()
    store.add(f"{processes._host()}/count", 1)
    store.set(f"{processes._host()}/1", content)
    with pytest.raises(StoreTampered, match="the process of a rank must be one that the rank wrote"):
        Peers(0).meet(store)


def test_descriptors_are_closed_with_their_owner():
    store, other = MemoryStore(), sleeping()
    announced(store, 1, other.pid)
    before = len(list(Path("/proc/self/fd").iterdir()))
    own = Peers(0)
    own.meet(store)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    del own
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    other.kill()
    other.wait()


def test_several_ranks_are_named_together():
    assert describe_ended({3: 30, 1: 10}).startswith(
        "ranks 1 and 3 have ended (processes 10, 30 of this host are gone)"
    )


def test_a_rank_that_ends_before_all_have_met_is_known_from_what_is_there():
    store, own, gone = MemoryStore(), Peers(0), sleeping()
    own.announce(store)
    announced(store, 1, gone.pid)
    store.add(f"{processes._host()}/count", 1)  # another one has begun to announce itself
    gone.kill()
    gone.wait()
    own.meet(store, is_complete=False)
    assert own.ended() == {1: gone.pid}
    assert not own.has_met


def test_ranks_that_are_threads_of_one_process_are_announced_once():
    store = MemoryStore()
    for rank in range(64):
        Peers(rank).announce(store)
    assert store.add(f"{processes._host()}/count", 0) == 1
