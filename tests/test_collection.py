"""Every test file and every doctest is collected by the configuration that CI uses."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.support.collected import COLLECTED

ROOT = Path(__file__).resolve().parent.parent


def collected_files(config):
    """Paths below the root of the files of which pytest collects something.

    Those of this run, if it is one of all tests: to collect them once more takes half a minute.
    """
    own = {item.partition("::")[0] for item in config.stash[COLLECTED]}
    if len(own) > 300:
        return own
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", "-p", "no:xdist"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return {line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line}


def doctest_modules():
    """Modules with an example in the docstring of themselves, a class or a function."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("quality/*.py")]):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
        if any(re.search(r"^\s*>>> ", ast.get_docstring(node) or "", re.MULTILINE) for node in nodes):
            yield str(path.relative_to(ROOT))


def test_every_test_file_and_every_doctest_is_collected(pytestconfig):
    collected = collected_files(pytestconfig)
    tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")}
    assert len(tests) > 100
    assert tests - collected == set()
    assert set(doctest_modules()) - collected == set()


def test_no_test_module_skips_as_a_whole():
    """A skip outside of a test leaves out a file with one line of output: tests, fixtures and marks skip."""
    skips = re.compile(r"^\w[^\n]*\bpytest\.(importorskip|skip)\(", re.MULTILINE)
    wrong = [path.name for path in ROOT.glob("tests/**/*.py") if skips.search(path.read_text())]
    assert wrong == []


def test_markers_are_deselected_in_the_makefile_and_not_for_everybody():
    options = re.search(r"^addopts = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert options is not None
    assert " -m" not in options[1]
    assert "-k" not in options[1]


def test_every_benchmark_can_be_imported():
    modules = [f"benchmarks.{path.stem}" for path in sorted(ROOT.glob("benchmarks/*.py")) if path.stem != "__main__"]
    assert len(modules) > 10
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
