"""Two processes on the one GPU, over gloo or over NCCL: `python -m tests.gpu.sections.two_ranks BACKEND --out FOLDER`.

NCCL refuses two ranks of one host on one GPU. Told that they are on two hosts, it connects them by sockets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.card import IS_DRY
from tests.gpu.sections.result import Result, run_section
from tests.support.processes.launching import environments

SCRIPT = Path(__file__).parents[1] / "two_ranks.py"
SECONDS = 110
TWO_HOSTS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def launch(backend: str, out: Path, result: Result) -> None:
    """Runs all checks on both ranks. A check has passed if it has on each rank that reports it."""
    logs = [(out / f"two_ranks_{backend}_{rank}.log").open("w+") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), "gloo" if IS_DRY else backend, str(out / backend)],
            env={**place, **TWO_HOSTS, "NCCL_HOSTID": f"host{rank}", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, (place, log) in enumerate(zip(environments(2), logs, strict=True))
    ]
    try:
        for process in ranks:
            process.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        result.failed["all of it"] = f"longer than {SECONDS} s"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, log in enumerate(logs):
        log.seek(0)
        for found in [json.loads(line) for line in log if line.startswith('{"name"')]:
            name = f"{backend}: {found['name']}"
            if found["outcome"] == "passed" and name not in result.failed:
                result.passed = [*{*result.passed, name}]
            elif found["outcome"] == "failed":
                result.passed = [other for other in result.passed if other != name]
                result.failed[name] = f"{result.failed.get(name, '')}rank {rank}: {found['why']}\n"
            result.figures[f"{name}, rank {rank}, seconds"] = found.get("seconds")
        log.close()
    if not result.passed and not result.failed:
        text = (out / f"two_ranks_{backend}_0.log").read_text()[-1500:]
        result.not_run[f"{backend}: all of it"] = text
    result.passed.sort()


if __name__ == "__main__":
    backend = sys.argv.pop(1)
    run_section(f"two_ranks_{backend}", lambda out, result: launch(backend, out, result))
