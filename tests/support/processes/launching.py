"""What a launcher sets for the processes that it starts."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

from tests.support import ROOT

QUIET = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environments(size, launcher="torch"):
    """What a launcher sets for each rank."""
    port = free_port()
    for rank in range(size):
        if launcher == "srun":
            names = {
                "SLURM_PROCID": rank,
                "SLURM_STEP_NUM_TASKS": size,
                "SLURM_NODELIST": "localhost",
                "SLURM_JOB_ID": port - 10_000,
            }
            if not 10_000 <= port < 30_000:
                names["MASTER_PORT"] = port
        else:
            names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        yield {**os.environ, **QUIET, **{name: str(value) for name, value in names.items()}}


def without_gloo(output):
    """Lines of a program's output, without those that torch 2.9 adds where processes meet over gloo.

    Several processes may write to one file, and then tear each other's lines.
    """
    return [line for line in output.splitlines() if line.strip() and not any(words in line for words in _GLOO)]


def first_line(stream):
    """The first such line of a stream."""
    return next((line for line in stream if not any(words in line for words in _GLOO)), "")


_GLOO = ("[Gloo]", "is connected to", "connected peer ranks")


def run_script(script, size, *arguments, limit_seconds, gone=None, expected_status=0, parses=True, **variables):
    """Runs a script on several ranks. Returns what each wrote to standard output, as lines of JSON.

    Files take the output, because a rank that waits for a reader of its pipe would keep the others waiting.

    Args:
        gone: a rank that is not waited for.
        expected_status: exit status of the others.
        parses: False to return nothing, for programs that write other lines.
        variables: further variables of the environment.
    """
    command = [sys.executable, "-W", "ignore", str(script), *map(str, arguments)]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        places = [{**place, "PYTHONPATH": str(ROOT), **variables} for place in environments(size)]
        ranks = [
            subprocess.Popen(command, env=place, stdout=output, stderr=error)
            for place, output, error in zip(places, outputs, errors, strict=True)
        ]
        waited = [rank for rank in range(size) if rank != gone]
        try:
            deadline = time.monotonic() + limit_seconds
            statuses = [ranks[rank].wait(max(0.1, deadline - time.monotonic())) for rank in waited]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for file in (*outputs, *errors):
            file.seek(0)
        words = "\n".join(error.read().decode()[-2000:] for error in errors)
        assert statuses == [expected_status] * len(waited), words
        return [[json.loads(line) for line in without_gloo(outputs[rank].read().decode())] for rank in waited if parses]
