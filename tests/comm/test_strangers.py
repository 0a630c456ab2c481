"""Processes outside the group that reach the rendezvous store, and addresses from which they must not."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.comm import stranger
from tests.support.processes.launching import environments, without_gloo
from trackbed.comm import run_ranks
from trackbed.comm.launch import listen_at, own_addresses
from trackbed.comm.store import MemoryStore
from trackbed.errors import CollectiveError

RANK = Path(__file__).with_name("guarded_rank.py")
STRANGER = Path(stranger.__file__)
LIMIT_SECONDS = 60
TIMEOUT_SECONDS = 4
SIZE = 3
HARMLESS = ("look",)
IN_CI = ("answer first", "forge outcomes", "put back")
"""Attacks that forge or replay answers; the others are slow tests."""
ATTACKS = [
    mode if mode in IN_CI else pytest.param(mode, marks=pytest.mark.slow)
    for mode in sorted(set(stranger.MODES) - set(HARMLESS))
]
TAMPERED = "another process has changed the rendezvous store"


def start(environment, *, turns, secret):
    arguments = [sys.executable, "-W", "ignore", str(RANK), str(turns), str(TIMEOUT_SECONDS), secret]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


needs_list = pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="the store of torch 2.9 lists no keys")


def attacked(mode, *, turns=100_000, secrets=("secret",) * SIZE):
    """Returns the reports of ranks under an attack of `mode` by a stranger, and their whole output."""
    places = list(environments(SIZE))
    ranks = [start(place, turns=turns, secret=secret) for place, secret in zip(places, secrets, strict=True)]
    other = None
    if mode is not None:
        arguments = [sys.executable, "-W", "ignore", str(STRANGER), places[0]["MASTER_PORT"], mode]
        other = subprocess.Popen(arguments, env=places[0], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert other.stdout.readline() == "there\n"
    began = time.time()
    try:
        outputs = [rank.communicate(timeout=LIMIT_SECONDS) for rank in ranks]
    finally:
        for process in filter(None, [*ranks, other]):
            process.kill()
            process.communicate()
    reports = []
    for out, err in outputs:
        lines = [json.loads(line) for line in without_gloo(out)]
        assert len(lines) == 2, (out, err[-2000:])
        reports.append({**lines[0], **lines[1], "after": lines[1]["at"] - began})
    return reports, "".join(out + err for out, err in outputs)


@needs_list
@pytest.mark.parametrize("mode", ATTACKS)
def test_a_stranger_without_the_secret_can_end_a_job_but_is_never_trusted(mode):
    reports, text = attacked(mode)
    assert not any("wrong" in report for report in reports), reports
    assert stranger.WORDS not in text
    assert all(report["raised"] for report in reports), reports
    assert any(TAMPERED in report["raised"] for report in reports), reports
    # The start of the processes, then the timeout and the gap between checks.
    assert max(report["seconds"] for report in reports) < 2 * TIMEOUT_SECONDS + 4, reports


@needs_list
def test_a_stranger_who_only_looks_changes_nothing():
    reports, _ = attacked("look", turns=20)
    assert [(report["raised"], report["turns"]) for report in reports] == [(None, 20)] * SIZE


def test_a_rank_with_another_secret_is_not_trusted():
    reports, _ = attacked(None, turns=5, secrets=("secret", "secret", "another"))
    assert all(report["raised"] for report in reports), reports
    assert any("ranks whose secrets differ" in report["raised"] for report in reports)


def test_the_store_of_ranks_on_one_host_listens_on_no_other_interface(monkeypatch):
    others = other_addresses()
    if not others:
        pytest.skip("this machine has no address but its loopback ones")
    places = [{**place, "LOCAL_WORLD_SIZE": str(SIZE), "MASTER_ADDR": others[0]} for place in environments(SIZE)]
    port = int(places[0]["MASTER_PORT"])
    ranks = [start(place, turns=100_000, secret="secret") for place in places]
    try:
        assert reaches("127.0.0.1", port)
        assert not any(reaches(address, port, seconds=0.2) for address in others)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_socket_listens_at_its_address_alone(address):
    with listen_at([address], 0) as listener:
        port = listener.getsockname()[1]
        assert reaches(address, port)
        assert not reaches("127.0.0.3", port, seconds=0.1)
        with pytest.raises(CollectiveError, match=f"{address}:{port}: must be free for the ranks' store, but: Address"):
            listen_at([address], port)


def test_an_address_of_another_host_is_rejected():
    with pytest.raises(
        CollectiveError, match=r"192\.0\.2\.1: must be an address of the host of rank 0, but is none: set"
    ):
        listen_at(["192.0.2.1"], 0)


def test_a_name_that_resolves_to_loopback_is_replaced_by_the_address_towards_the_launcher(monkeypatch, caplog):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert own_addresses("node7", {}) == ["127.0.1.1"]
    assert "node7 resolves to 127.0.1.1, which other hosts cannot reach" in caplog.text
    for address in other_addresses()[:1]:
        assert own_addresses("node7", {"SLURM_LAUNCH_NODE_IPADDR": address}) == [address]


def test_values_of_an_earlier_start_are_not_trusted():
    """A stranger replays, key by key, all values that an earlier job with the same secret wrote."""
    kept = {}

    class Kept(MemoryStore):
        def set(self, key, value):
            kept.setdefault(key, []).append(value)
            super().set(key, value)

        def set_first(self, key, value):
            kept.setdefault(key, []).append(value)
            return super().set_first(key, value)

    earlier, later = Kept(), MemoryStore()
    secret = b"secret"
    assert (
        run_ranks(2, lambda group: group.all_gather("old"), connect=lambda: earlier, secret=secret) == [["old"] * 2] * 2
    )
    # The new job has one rank; the stranger plays the other.
    for key, values in kept.items():
        if not key.startswith("rank/0"):
            later.set(key, values[0])
    later.set("0/flag", b"")
    later.add("0/count", 1)

    def work(group):
        if group.rank == 0:
            return group.all_gather("new")
        return None

    with pytest.raises(CollectiveError, match=TAMPERED):
        run_ranks(2, work, connect=lambda: later, secret=secret, timeout_seconds=2)


def other_addresses():
    """Returns the addresses of this machine other than loopback."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return [address for address in found if ":" not in address]


def reaches(address, port, *, seconds=20.0):
    """True if a socket accepts connections there within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True
