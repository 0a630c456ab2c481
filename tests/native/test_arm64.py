"""Tests of the kernels on arm64 in an emulator: results are bit-identical to those of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.fused import fused_instructions, missing

ROOT = Path(__file__).parents[2]
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
ARM64 = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing("aarch64-linux-gnu-g++") != [], reason="aarch64-linux-gnu-g++ is not installed"),
    pytest.mark.skipif(missing("g++") != [], reason="g++ is not installed"),
    pytest.mark.skipif(
        missing(*EMULATORS) == list(EMULATORS), reason=f"neither {' nor '.join(EMULATORS)} is installed"
    ),
]


def build(folder, compiler, *options):
    """Builds the native tests in `folder`. Returns the path of the program."""
    # Tools installed beside Python take precedence, because the system's CMake may be too old.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), f"-DCMAKE_CXX_COMPILER={compiler}", *options]
    for command in (
        [*configure, "-DTRACKBED_PYTHON=OFF", "-DTRACKBED_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(folder)],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "test_kernels"


@pytest.fixture(scope="module")
def arm64(tmp_path_factory):
    return build(tmp_path_factory.mktemp("arm64"), "aarch64-linux-gnu-g++", *ARM64)


def golden(output):
    return [line for line in output.splitlines() if line.startswith("golden ")]


def test_the_native_tests_pass_on_arm64_with_the_checksums_of_this_machine(arm64, tmp_path):
    emulator = next(program for program in EMULATORS if missing(program) == [])
    there = subprocess.run([emulator, str(arm64)], capture_output=True, text=True, check=False)
    here = subprocess.run([str(build(tmp_path, "g++"))], capture_output=True, text=True, check=False)
    for done in (there, here):
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1].endswith(" passed, 0 failed")
    assert len(golden(here.stdout)) == 7
    assert golden(there.stdout) == golden(here.stdout)


@pytest.mark.skipif(missing("aarch64-linux-gnu-objdump") != [], reason="aarch64-linux-gnu-objdump is not installed")
def test_the_arm64_kernels_have_no_fused_multiply_add(arm64, tmp_path):
    objects = [path for path in arm64.parent.rglob("*.o") if path.parent.name == "src"]
    assert len(objects) >= 6
    for path in objects:
        assert fused_instructions(path, "aarch64-linux-gnu-objdump")[0] == []
    # By default the compiler fuses, because every arm64 processor supports it.
    source = ROOT / "native" / "src" / "blend_loops.cpp"
    flags = ["-std=c++20", "-O3", "-DTRACKBED_LEVEL=baseline", "-DTRACKBED_LANE_BYTES=16", "-Wno-psabi"]
    flags.append(f"-I{ROOT / 'native' / 'include'}")
    subprocess.run(["aarch64-linux-gnu-g++", *flags, "-c", str(source), "-o", str(tmp_path / "fused.o")], check=True)
    assert fused_instructions(tmp_path / "fused.o", "aarch64-linux-gnu-objdump")[0] != []
