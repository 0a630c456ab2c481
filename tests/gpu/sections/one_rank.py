"""Tests of one process on the GPU, by pytest."""

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.gpu.card import IS_DRY
from tests.gpu.sections.result import Result, run_section

FOLDER = Path(__file__).parents[1]


def run(out: Path, result: Result) -> None:
    """Runs the tests of this folder, several at a time where xdist is installed, and counts them."""
    report = out / "one_rank.xml"
    files = [FOLDER / f"test_{name}.py" for name in ("gradients", "optimizer", "loader", "checkpoints")]
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=", f"--junitxml={report}", "--confcutdir", FOLDER]
    if not IS_DRY and importlib.util.find_spec("xdist"):
        options += ["--numprocesses", "4"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    subprocess.run(list(map(str, command)), check=False)
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        broken = next((found for found in map(case.find, ("failure", "error")) if found is not None), None)
        if broken is not None:
            result.failed[name] = f"{broken.get('message', '')[:300]}\n{(broken.text or '')[-1200:]}"
        elif skipped is not None:
            result.not_run[name] = skipped.get("message", "")
        else:
            result.passed.append(name)


if __name__ == "__main__":
    run_section("one_rank", run)
