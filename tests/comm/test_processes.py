"""Groups of real processes, one of which fails, dies or hangs in the middle of a step."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes.launching import QUIET, environments, free_port, run_script, without_gloo
from tests.support.tiers import slow_but

RANK = Path(__file__).with_name("rank.py")
LIMIT_SECONDS = 60
# Enough for a loaded machine to start all processes, and for torch to query a name server that does not exist.
TIMEOUT_SECONDS = 4


def run(how, mode, who, *, size=3, timeout=TIMEOUT_SECONDS, launcher="torch"):
    """Returns the report of each rank; that of a rank that hangs, until the others end."""
    arguments = [sys.executable, "-W", "ignore", str(RANK), how, mode, str(who), str(timeout)]
    ranks = [
        subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for environment in environments(size, launcher)
    ]
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        for rank, process in enumerate(ranks):
            if not (rank == who and mode in ("stop", "hang")):
                process.wait(timeout=deadline - time.monotonic())
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
    return [reported(process.communicate()[0]) for process in ranks]


def reported(output):
    found = {}
    for line in without_gloo(output):
        found.update(json.loads(line))
    return found


def others(ranks, who):
    return [rank for number, rank in enumerate(ranks) if number != who]


def delays(ranks, who):
    """Returns the seconds from the failure to each rank's error."""
    return [rank["at"] - ranks[who]["failed"] for rank in ranks if "at" in rank]


@pytest.mark.parametrize("launcher", ["torch", "srun"])
def test_without_a_failure_no_rank_raises(launcher):
    ranks = run("environment", "nothing", -1, launcher=launcher)
    assert [rank["raised"] for rank in ranks] == [None] * 3
    assert [(rank["rank"], rank["size"]) for rank in ranks] == [(0, 3), (1, 3), (2, 3)]


SLOW_TO_TIDY = """
import sys, time
from trackbed.comm.launch import group_from_environment
from trackbed.comm.torch_store import TimeoutStore

delete = TimeoutStore.delete
TimeoutStore.delete = lambda store, key: (time.sleep(0.3), delete(store, key))
group = group_from_environment(20)
with group.guarded("building the indices"):
    time.sleep(group.rank / 2)  # the last rank to arrive deletes the keys
    group.barrier()
"""


def test_the_host_of_the_store_stays_until_all_have_tidied_up():
    ranks = [subprocess.Popen([sys.executable, "-c", SLOW_TO_TIDY], env=environment) for environment in environments(2)]
    assert [rank.wait(timeout=LIMIT_SECONDS) for rank in ranks] == [0, 0]


@pytest.mark.parametrize("who", slow_but([0], [0, 1, 2]))
def test_an_exception_is_raised_on_every_rank_within_two_seconds(who):
    ranks = run("environment", "raise", who)
    text = f"building the indices: rank {who}: CacheError: /x/y: must be whole, but is not"
    assert [rank["raised"] for rank in ranks] == [text] * 3
    assert ranks[who]["cause"].startswith("CacheError(")
    assert max(delays(ranks, who)) < 2


@pytest.mark.parametrize(
    ("mode", "who"),
    slow_but(
        [("interrupt", 2), ("interrupt while waiting", 1)],
        [("interrupt", 0), ("interrupt", 2), ("interrupt while waiting", 1)],
    ),
)
def test_ctrl_c_on_one_rank_is_reported_to_the_others(mode, who):
    ranks = run("environment", mode, who)
    assert ranks[who]["raised"] == "KeyboardInterrupt"
    assert {rank["raised"] for rank in others(ranks, who)} == {f"building the indices: rank {who}: KeyboardInterrupt"}
    assert max(delays(ranks, who)) < 2


@pytest.mark.parametrize(
    ("mode", "who"), slow_but([("kill", 1), ("hang", 1)], [("kill", 1), ("kill", 2), ("stop", 2), ("hang", 1)])
)
def test_a_rank_that_dies_or_hangs_is_named_in_time(mode, who):
    ranks = run("environment", mode, who)
    silent = rf"rank {who} sent no heartbeat for \d s, while ranks {'0 and 2' if who == 1 else '0 and 1'} waited"
    text = rf"rank {who} has ended \(process " if mode == "kill" else silent
    raised = [rank["raised"] for rank in others(ranks, who)]
    assert [bool(re.match(f"building the indices: {text}", one)) for one in raised] == [True] * 2, raised
    assert max(delays(ranks, who)) < (2 if mode == "kill" else 1.2 * TIMEOUT_SECONDS) + 2


@pytest.mark.parametrize("mode", slow_but(["disconnect and die", "stop"], ["kill", "disconnect and die", "stop"]))
def test_the_host_of_the_store_is_named_when_it_dies_or_stops(mode):
    ranks = run("environment", mode, 0)
    for rank in others(ranks, 0):
        if mode != "stop":
            assert rank["raised"].startswith("building the indices: rank 0 has ended (process ")
            continue
        assert rank["raised"].startswith("building the indices: the rendezvous store must answer, but")
        assert "its host (usually rank 0) cannot be reached" in rank["raised"]
    assert max(delays(ranks, 0)) < TIMEOUT_SECONDS + 2


def test_a_host_that_hangs_but_serves_the_store_is_named_as_a_rank():
    ranks = run("environment", "hang", 0)
    text = "building the indices: rank 0 sent no heartbeat for 4 s, while ranks 1 and 2 waited"
    assert [rank["raised"] for rank in others(ranks, 0)] == [text] * 2


@pytest.mark.parametrize(
    ("how", "mode"),
    slow_but(
        [("environment", "stop"), ("torch", "kill")],
        [("environment", "kill"), ("environment", "stop"), ("torch", "kill")],
    ),
)
def test_a_rank_that_dies_is_named_in_a_group_and_in_its_child_at_the_same_time(how, mode):
    ranks = run(f"{how} and child", mode, 1)
    silent = "rank 1 sent no heartbeat for 4 s, while ranks 0 and 2 waited"
    text = f"building the indices: {'rank 1 has ended (process ' if mode == 'kill' else silent}"
    for rank in others(ranks, 1):
        assert [found.startswith(text) for found in (rank["raised"], rank["child"]["raised"])] == [True] * 2
        assert rank["child"]["pids"] == rank["pids"]
        assert max(rank["at"], rank["child"]["at"]) - ranks[1]["failed"] < 1.2 * TIMEOUT_SECONDS + 2


def test_the_host_of_the_store_is_named_in_a_group_and_in_its_child_when_it_dies():
    ranks = run("environment and child", "kill", 0)
    for rank in others(ranks, 0):
        assert "rank 0 has ended (process " in rank["raised"]
        assert "rank 0 has ended (process " in rank["child"]["raised"]
        assert max(rank["at"], rank["child"]["at"]) - ranks[0]["failed"] < TIMEOUT_SECONDS + 2


@pytest.mark.parametrize("how", slow_but(["subgroup"], ["environment", "torch", "subgroup"]))
def test_a_group_and_its_child_end_without_a_failure(how):
    ranks = run(f"{how} and child", "nothing", -1, size=4)
    assert [(rank["raised"], rank["child"]["raised"]) for rank in ranks] == [(None, None)] * 4
    assert all(rank["child"]["pids"] == rank["pids"] for rank in ranks)


@pytest.mark.parametrize("mode", slow_but(["raise"], ["raise", "kill"]))
def test_a_process_group_of_torch_uses_its_store(mode):
    ranks = run("torch", mode, 1)
    words = "rank 1: CacheError" if mode == "raise" else "rank 1 has ended (process "
    assert all(words in rank["raised"] for rank in ranks if "raised" in rank)
    assert len([rank for rank in ranks if "raised" in rank]) == (3 if mode == "raise" else 2)


def test_subgroups_are_independent():
    ranks = run("subgroup", "raise", 1, size=4)
    assert [rank["size"] for rank in ranks] == [2] * 4
    assert [rank["pids"] == ranks[0]["pids"] for rank in ranks] == [True, False, True, False]
    for pair in ((0, 2), (1, 3)):
        assert {ranks[rank]["raised"].split(": ")[1] for rank in pair} == {"rank 1"}


@pytest.mark.parametrize("how", slow_but(["environment"], ["environment", "torch"]))
def test_under_torchrun(how, tmp_path):
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=3"]
    places = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        f"--log-dir={tmp_path}",
        "--redirects=1",
    ]
    subprocess.run(
        [*torchrun, *places, str(RANK), how, "raise", "2", "30"],
        env={**os.environ, **QUIET},
        timeout=LIMIT_SECONDS,
        check=True,
        capture_output=True,
    )
    ranks = [reported(path.read_text()) for path in sorted(tmp_path.rglob("stdout.log"))]
    text = "building the indices: rank 2: CacheError: /x/y: must be whole, but is not"
    assert [rank["raised"] for rank in ranks] == [text] * 3


def test_a_forked_child_that_leaves_a_step_does_not_end_it():
    found = run_script(Path(__file__).with_name("forking_rank.py"), 2, limit_seconds=60)
    assert found == [[{"status": status, "gathered": [0, 1], "again": [0, 1]}] for status in (5, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_every_other_rank_is_notified_of_any_failure_of_any_rank(seed):
    draw = random.Random(seed)
    for _ in range(20):
        mode, who = draw.choice(["raise", "interrupt", "kill", "stop", "hang"]), draw.randrange(3)
        ranks = run("environment", mode, who, timeout=3)
        assert all(rank["raised"] for rank in others(ranks, who)), (mode, who, ranks)
        assert max(delays(ranks, who)) < (2 if mode in ("raise", "interrupt") else 6), (mode, who, ranks)
