"""Without a C++ compiler the build ends at once, and says what to install."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WANTED = "Trackbed needs a C++20 compiler such as g++, found none on PATH: apt install g++ "


@pytest.fixture
def path_without_compiler(tmp_path):
    """A folder with the programs that a build uses, and no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in (
        "sh",
        "bash",
        "env",
        "make",
        "ninja",
        "cmake",
        "find",
        "date",
        "touch",
        "test",
        "mkdir",
        "rm",
        "uname",
    ):
        found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if found:
            (folder / name).symlink_to(found)
    return {**{name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}, "PATH": str(folder)}


def test_an_install_ends_with_one_line_that_names_the_compiler(tmp_path, path_without_compiler):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("native", "src"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("build*", "__pycache__"))
    started = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", "out", "./source"],
        cwd=tmp_path,
        env=path_without_compiler,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.monotonic() - started
    assert found.returncode != 0
    lines = [line for line in found.stdout.splitlines() if not line.startswith("WARNING: Location")]
    assert sum(WANTED in line for line in lines) == 1, found.stdout
    assert len(lines) <= 40, found.stdout
    assert seconds < 10


def test_make_looks_for_the_compiler_before_it_fetches_anything(tmp_path, path_without_compiler):
    (tmp_path / "native").mkdir()
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    found = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env=path_without_compiler, capture_output=True, text=True, timeout=10
    )
    assert found.returncode != 0
    assert found.stderr.startswith(WANTED)
    assert not (tmp_path / ".venv").exists()


def test_a_compiler_that_a_toolchain_file_names_need_not_be_on_path(tmp_path, path_without_compiler):
    (tmp_path / "toolchain.cmake").write_text(f'set(CMAKE_CXX_COMPILER "{sys.executable}")\n')
    options = ["-DTRACKBED_PYTHON=OFF", f"-DCMAKE_TOOLCHAIN_FILE={tmp_path}/toolchain.cmake"]
    command = ["cmake", "-S", str(ROOT / "native"), "-B", str(tmp_path / "build"), "-G", "Ninja", *options]
    found = subprocess.run(command, env=path_without_compiler, capture_output=True, text=True, timeout=60)
    assert WANTED not in found.stderr
    assert "compiler identification" in found.stdout  # which is that of the file
