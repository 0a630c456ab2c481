"""Runs Megatron-LM's own dataset tests, core_v0.16.1, on Trackbed through `trackbed.megatron.install()`.

    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM

One gloo rank, no GPU. The checkout is read, never copied; `requirements.txt` beside this file has what its
training package imports.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = ("tests/unit_tests/data/test_builder.py", "tests/unit_tests/data/test_gpt_dataset.py")


def main() -> int:
    if len(sys.argv) < 2 or not all((Path(sys.argv[1]) / test).is_file() for test in TESTS):
        found = sys.argv[1] if len(sys.argv) > 1 else "no path"
        print(f"skipped: a checkout of Megatron-LM (core_v0.16.1) with {' and '.join(TESTS)} is needed, found {found}")
        return 0 if len(sys.argv) < 2 or not sys.argv[1] else 2
    checkout = Path(sys.argv[1]).resolve()
    path = os.pathsep.join(filter(None, [str(checkout), str(HERE), os.environ.get("PYTHONPATH")]))
    command = [
        *(sys.executable, "-W", "ignore", "-m", "pytest", "-c", os.devnull, "--rootdir", str(checkout)),
        *("--noconftest", "-p", "gloo_shim", "-p", "no:cacheprovider", "-q", "-ra", *sys.argv[2:], *TESTS),
    ]
    return subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
