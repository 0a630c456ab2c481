"""Runs the fast tests in each environment, one after the other: `python tests/versions/run.py [NAME ...]`.

An environment takes up to 8 GB and half an hour, and is removed after its tests. One whose Python is neither on PATH
nor in pyenv is skipped, with the reason. What was found goes into `results.json` beside this program, an entry for each
environment, and `docs/reference/versions.md` has it as a table. pip takes torch from where it is configured to.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.versions.environments import ENVIRONMENTS, Environment  # noqa: E402 - the tests are no package elsewhere

RESULTS = Path(__file__).parent / "results.json"
EXTRAS = ("text", "sentences", "s3", "ray", "plot", "grain", "huggingface", "lightning", "dev")
SAME_EVERYWHERE = ("docs", "gpu", "quality", "test_collection.py", "versions")
"""Tests of pages, of counts that depend on a seed alone, and of GPUs."""
WHEEL_TESTS = (
    *("tests/kernels", "tests/index", "tests/native", "tests/tokens", "tests/conformance"),
    *("tests/datasets/test_golden.py", "tests/optim/test_earlier_states.py", "tests/checkpoint/test_megatron_0_19.py"),
)
"""Kernels, token files, conformance and golden vectors."""
PINNED_NUMPY = "2.4.6"
"""That of `constraints.txt`, for which its other packages were chosen."""
MOST_SHOWN = 20


def find_python(version: str) -> str | None:
    """Path of a Python on PATH or in pyenv."""
    found = shutil.which(f"python{version}")
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(roots.glob(f"{version}.*/bin/python"))
    for candidate in [*([found] if found else []), *map(str, reversed(installed))]:
        said = subprocess.run([candidate, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
        if said.returncode == 0 and said.stdout.startswith(f"{version}."):
            return candidate
    return None


def requirements(environment: Environment) -> tuple[list[str], list[str]]:
    """What is installed beside torch, NumPy and Trackbed, and the constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *(name for extra in EXTRAS for name in project["optional-dependencies"][extra])]
    ours = ("trackbed", "megatron-core", "torch>", "numpy")
    wanted = [name for name in names if not name.startswith(ours)]
    if environment.megatron_core is not None:
        wanted.append(f"megatron-core=={environment.megatron_core}")
    if environment.megatron_bridge is not None:
        wanted.append("datasets")  # the only package of its dependencies that is not there already
    free = {"torch", "numpy", "megatron-core", "triton", *(one.partition("==")[0] for one in environment.others)}
    free |= set() if environment.numpy == PINNED_NUMPY else {"scipy"}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in pinned if line.partition("==")[0] not in free and not line.startswith("#")]
    own = {"torch": environment.torch, "numpy": environment.numpy}
    return wanted, [*kept, *environment.others, *(f"{name}=={version}" for name, version in own.items() if version)]


def install(environment: Environment, python: str, folder: Path, wheels: Path | None = None) -> None:
    """Makes the environment, with Trackbed as it is here, or with its wheel in a folder."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin" / "python")
    wanted, pinned = requirements(environment)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pinned))
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    path = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    first = [f"torch=={environment.torch}" if environment.torch else "torch"]
    first.append(f"numpy=={environment.numpy}" if environment.numpy else "numpy")
    steps = [
        ["--upgrade", "pip"],
        first,
        ["--constraint", str(constraints), "scikit-build-core", "nanobind", "cmake", "ninja"],
        ["--constraint", str(constraints), *wanted],
        ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
        if wheels is None
        else ["--no-deps", "--no-index", "--find-links", str(wheels), "trackbed"],
    ]
    if environment.megatron_bridge is not None:
        steps.append(["--no-deps", f"megatron-bridge=={environment.megatron_bridge}"])
    for step in steps:
        subprocess.run([*pip, *step], check=True, env=path)


def run_tests(folder: Path, jobs: int) -> dict[str, object]:
    """Runs the fast tests. Returns the counts, and the names of those that failed."""
    own, report = str(folder / "bin" / "python"), folder / "report.xml"
    tests = [path for path in sorted((ROOT / "tests").iterdir()) if path.name not in SAME_EVERYWHERE]
    chosen = [
        str(path)
        for path in tests
        if path.name.startswith("test_") or (path.is_dir() and list(path.rglob("test_*.py")))
    ]
    started = time.monotonic()
    subprocess.run(
        [own, "-m", "pytest", "-q", "-m", "not slow", "-n", str(jobs), f"--junitxml={report}", *chosen],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        check=False,
    )
    suite = ET.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if {child.tag for child in case} & {"failure", "error"}
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": failed,
        "seconds": round(time.monotonic() - started),
    }


def run_wheel_tests(environment: Environment, python: str, wheels: Path, jobs: int, *, keep: bool) -> int:
    """Installs the wheel for a Python into an environment of its own, and runs the tests of wheels there."""
    folder = ROOT / "build" / "versions" / f"{environment.name}-wheel"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        install(environment, python, folder, wheels)
        path = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        tests = [str(folder / "bin" / "python"), "-m", "pytest", "-q"]
        subprocess.run([folder / "bin" / "trackbed", "--version"], check=True)
        return sum(
            subprocess.run([*tests, *arguments], cwd=ROOT, env=path, check=False).returncode
            for arguments in (
                ["-m", "not slow", "-n", str(jobs), *WHEEL_TESTS],
                ["tests/docs/test_docs.py", "-k", "readmes_program"],
            )
        )
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def versions_in(folder: Path) -> dict[str, str | None]:
    """Versions that are installed in the environment."""
    names = ["torch", "numpy", "megatron-core"]
    program = f"""
import importlib.metadata, json, platform
found = {{"python": platform.python_version()}}
for name in {names}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""
    found = subprocess.run([str(folder / "bin" / "python"), "-c", program], capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(one.name for one in ENVIRONMENTS)}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that are there")
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="test the wheels in FOLDER instead")
    given = parser.parse_args()
    unknown = set(given.names) - {one.name for one in ENVIRONMENTS}
    if unknown:
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    status = 0
    for environment in ENVIRONMENTS:
        if given.names and environment.name not in given.names:
            continue
        python = find_python(environment.python)
        if python is None:
            print(
                f"{environment.name}: skipped: there is no Python {environment.python} on PATH or in pyenv", flush=True
            )
            continue
        print(f"{environment.name}: {python}", flush=True)
        if given.wheel is not None:
            wheels = given.wheel.absolute()
            status |= bool(run_wheel_tests(environment, python, wheels, given.jobs, keep=given.keep))
            continue
        folder = ROOT / "build" / "versions" / environment.name
        try:
            if not (given.keep and (folder / "constraints.txt").exists()):
                shutil.rmtree(folder, ignore_errors=True)
                install(environment, python, folder)
            found = {**versions_in(folder), "machine": platform.machine(), **run_tests(folder, given.jobs)}
        finally:
            if not given.keep:
                shutil.rmtree(folder, ignore_errors=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        found |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit.stdout.strip()}
        results[environment.name] = found
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        failed = found["failed"]
        print(
            f"{environment.name}: {found['passed']} passed, {len(failed)} failed, {found['skipped']} skipped",
            flush=True,
        )
        for name in failed[:MOST_SHOWN]:
            print(f"  {name}")
        status |= bool(failed)
    return status


if __name__ == "__main__":
    sys.exit(main())
