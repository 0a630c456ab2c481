"""Builds the kernels for a newer Python, if the machine has one, and runs their tests: `make test-newer`.

There is no torch in this environment, which takes a minute: `make test-versions` has the others.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.versions.run import find_python  # noqa: E402 - the tests are no package elsewhere

NEWER = ("3.14", "3.13", "3.12")
PACKAGES = (
    *("numpy", "orjson", "isal", "click", "packaging", "rich", "tokenizers"),
    *("scikit-build-core", "nanobind", "cmake", "ninja", "pytest", "pytest-xdist", "hypothesis", "psutil"),
)
WITH_TORCH = ("tests/kernels/test_rank_sum.py", "tests/kernels/test_square_sum.py")
TESTS = ("tests/kernels", "tests/index", "tests/native/test_levels.py", "tests/tokens/test_format.py")


def main() -> int:
    python = next((found for version in NEWER if (found := find_python(version)) is not None), None)
    if python is None:
        print(f"none of Python {', '.join(NEWER)} is on PATH or in pyenv")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([python, "-m", "venv", name], check=True)
        own = str(folder / "bin" / "python")
        pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        path = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *PACKAGES], check=True, env=path)
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", str(ROOT)], check=True, env=path)
        subprocess.run([folder / "bin" / "trackbed", "--version"], check=True)
        ignored = [f"--ignore={test}" for test in WITH_TORCH]
        tests = [own, "-m", "pytest", "-q", "-m", "not slow", "-n", "2", *ignored, *TESTS]
        return subprocess.run(tests, cwd=ROOT, env=path, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
