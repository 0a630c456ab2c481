"""The thread for calls that may block: what happens where the interpreter ends while one runs."""

import subprocess
import sys
import time

import pytest

# The call blocks in C++, in a connection to a server that accepts nobody.
RETURNS_SOON = """
import socket
import time
from torch.distributed import TCPStore
from datetime import timedelta
from trackbed.comm.blocking_calls import Worker

server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen(0)
port = server.getsockname()[1]
clients = [socket.socket() for _ in range(3)]
for client in clients:
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
worker = Worker()
worker.submit(lambda: TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS)))
time.sleep(SECONDS - 0.02)
"""
RETURNS_NEVER = """
import time
from trackbed.comm.blocking_calls import Worker

worker = Worker()
worker.submit(lambda: time.sleep(60))
print(time.monotonic(), flush=True)
"""
IDLE = RETURNS_NEVER.replace("time.sleep(60)", "None").replace("print", "time.sleep(0.1)\nprint")


def run(script):
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("seconds", [0.5, *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (0.7, 0.9))])
def test_a_call_that_returns_while_the_interpreter_ends_does_not_abort_it(seconds):
    process = run(RETURNS_SOON.replace("SECONDS", str(seconds)))
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize(("script", "limit_seconds"), [(RETURNS_NEVER, 3.5), (IDLE, 1.5)])
def test_the_interpreter_waits_two_seconds_for_a_call_that_runs_and_not_for_an_idle_thread(script, limit_seconds):
    process = run(script)
    assert process.returncode == 0
    assert time.monotonic() - float(process.stdout) < limit_seconds


SUBMITS_AT_EXIT = """
import atexit

def submit():
    print(worker.submit(lambda: 7).result(10), flush=True)

atexit.register(submit)
from trackbed.comm.blocking_calls import Worker

worker = Worker()
worker.submit(lambda: None)
"""


def test_calls_are_made_until_the_interpreter_has_ended():
    process = run(SUBMITS_AT_EXIT)
    assert (process.returncode, process.stdout) == (0, "7\n"), process.stderr
