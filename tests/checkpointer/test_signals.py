"""After a signal to any rank, `poll` is true at one step on all of them."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.processes.launching import environments, first_line
from tests.support.tiers import slow_but
from trackbed import Checkpointer
from trackbed.checkpointer.signals import SignalAgreement
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError

RANK = Path(__file__).parent / "signals_rank.py"
SIZE = 3


@pytest.mark.dist
@pytest.mark.parametrize(
    ("count", "period"),
    [(3, 1), pytest.param(100, 1, marks=pytest.mark.slow), pytest.param(100, 20, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("place", slow_but(["folder"], ["folder", "moto", "ceph"]), indirect=True)
def test_a_signal_at_any_moment_is_acted_on_by_all_ranks_at_one_step(count, period, place, tmp_path):
    draw = random.Random(count)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(RANK), str(tmp_path), str(period), place.text("checkpoints")],
            env={**variables, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for variables in environments(SIZE)
    ]
    watchdog = threading.Timer(60 + 3 * count, lambda: [rank.kill() for rank in ranks])
    watchdog.start()
    try:
        assert [first_line(rank.stdout) for rank in ranks] == ["ready\n"] * SIZE
        last = 0
        for _ in range(count):
            time.sleep(draw.random() * 0.1)
            number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
            for rank in draw.sample(ranks, draw.randint(1, SIZE)):
                rank.send_signal(number)
                time.sleep(draw.choice([0, 0, 0.01, 0.3]))
            name = None
            while name != number.name:  # signals that came one after the other may ask twice
                lines = [rank.stdout.readline() for rank in ranks]
                assert len(set(lines)) == 1, lines
                step, name = lines[0].split()
                assert int(step) > last
                last = int(step)
        (tmp_path / "end").touch()
        rest = [rank.stdout.read() for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0] * SIZE
        assert len(set(rest)) == 1, rest
        assert rest[0].endswith("end True\n")
    finally:
        watchdog.cancel()
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_one_process_needs_no_agreement(place):
    with Checkpointer(place.text("checkpoints"), group=SOLO) as checkpointer:
        assert not checkpointer.poll()
        checkpointer.save_on_signal(signal.SIGUSR1)
        with pytest.raises(ArgumentError, match="must be called once"):
            checkpointer.save_on_signal(signal.SIGUSR1)
        with pytest.raises(ArgumentError, match="must get the step"):
            checkpointer.poll()
        assert not checkpointer.poll(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [checkpointer.poll(step) for step in (2, 3)] == [True, False]
        assert checkpointer.received_signal is signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_no_rank_passes_the_step_while_the_ranks_agree(monkeypatch):
    """The slowest possible agreement: others poll while one thread has not answered."""
    found = {}

    def run(group):
        agreement = SignalAgreement(group.child("signals"))
        if group.rank == 1:
            agree = agreement._agree
            monkeypatch.setattr(agreement, "_agree", lambda: (time.sleep(0.3), agree()))
        steps = []
        for step in range(1, 400):
            if step == 50 and group.rank == 0:
                agreement.ask()
            if agreement.is_due(step):
                steps.append(step)
            time.sleep(0.002 * (1 + group.rank))
        found[group.rank] = steps
        agreement.close()

    run_ranks(3, run)
    assert len(found[0]) == 1
    assert found[0] == found[1] == found[2]


def test_a_signal_that_comes_while_the_ranks_agree_on_another_is_not_lost():
    found = {}

    def run(group):
        agreement = SignalAgreement(group.child("signals"))
        gather = agreement._group.all_gather

        def gather_slowly(value):
            if group.rank == 0 and value[1] == [signal.SIGUSR1]:
                agreement.ask(signal.SIGTERM)  # after this rank has said what it has received
            return gather(value)

        agreement._group.all_gather = gather_slowly
        acted = []
        for step in range(1, 300):
            if step == 50 and group.rank == 0:
                agreement.ask(signal.SIGUSR1)
            if agreement.is_due(step):
                acted.append((step, agreement.received))
            time.sleep(0.002)
        found[group.rank] = acted
        group.barrier()
        agreement.close()

    run_ranks(2, run)
    assert found[0] == found[1]
    assert [number for _, number in found[0]] == [signal.SIGUSR1, signal.SIGTERM]


FAILED = """
import os, signal, sys, time
from trackbed.checkpointer.signals import SignalAgreement
from trackbed.comm import SOLO
agreement = SignalAgreement(SOLO, [signal.SIGTERM])
agreement._has_failed = "fail" in sys.argv
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
print("goes on", agreement.is_due(1))
"""


@pytest.mark.parametrize(("arguments", "status", "said"), [([], 0, "goes on True\n"), (["fail"], -signal.SIGTERM, "")])
def test_a_signal_ends_a_program_whose_ranks_cannot_agree_any_more(arguments, status, said):
    found = subprocess.run([sys.executable, "-c", FAILED, *arguments], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (status, said)
