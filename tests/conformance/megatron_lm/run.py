"""Runs Megatron-LM's own dataset tests, core_v0.16.1, on Trackbed through `trackbed.megatron.install()`.

    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM
    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM --ranks 2

One gloo rank or several, no GPU; each rank runs every test, and all must pass. The checkout is read, never copied;
`requirements.txt` beside this file has what its
training package imports.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TESTS = ("tests/unit_tests/data/test_builder.py", "tests/unit_tests/data/test_gpt_dataset.py")


def main() -> int:
    if len(sys.argv) < 2 or not all((Path(sys.argv[1]) / test).is_file() for test in TESTS):
        found = sys.argv[1] if len(sys.argv) > 1 else "no path"
        print(f"skipped: a checkout of Megatron-LM (core_v0.16.1) with {' and '.join(TESTS)} is needed, found {found}")
        return 0 if len(sys.argv) < 2 or not sys.argv[1] else 2
    checkout = Path(sys.argv[1]).resolve()
    num_ranks, options = 1, sys.argv[2:]
    if "--ranks" in options:
        place = options.index("--ranks")
        num_ranks = int(options[place + 1])
        del options[place : place + 2]
    path = os.pathsep.join(filter(None, [str(checkout), str(HERE), os.environ.get("PYTHONPATH")]))
    command = [
        *(sys.executable, "-W", "ignore", "-m", "pytest", "-c", os.devnull, "--rootdir", str(checkout)),
        *("--noconftest", "-p", "gloo_shim", "-p", "no:cacheprovider", "-q", "-ra", *options, *TESTS),
    ]
    with tempfile.TemporaryDirectory() as shared:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
        common = {**os.environ, **meeting, "PYTHONPATH": path, "TRACKBED_TEST_FOLDER": shared}
        ranks = [
            subprocess.Popen(command, cwd=checkout, env={**common, "RANK": str(rank)}) for rank in range(num_ranks)
        ]
        return max(rank.wait() for rank in ranks)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
