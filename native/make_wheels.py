"""Builds the wheels and the sdist of a release: `make wheels`.

The compiler is Zig's, a package of PyPI, whose headers and libraries are those of the C library that a wheel asks for;
so neither a container nor a compiler of the system is needed, and wheels for arm64 are built on x86-64. Each wheel is
checked before it is left in the folder: tag, size, the symbols that it needs, the stable ABI where its name says
so, and that no module has a fused multiply-add.
"""

import argparse
import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import nanobind
import ziglang
from check_wheel import problems
from scikit_build_core.build import build_sdist

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Target:
    """A wheel to be built.

    Args:
        python: interpreter that builds it, whose headers are used.
        tag: "cp311" for that release of Python alone, or "cp312-abi3" for it and all later ones.
        architecture: of the processor.
    """

    python: str
    tag: str
    architecture: str

    @property
    def platform(self) -> str:
        """Tag of the platform."""
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.architecture}"


def find_pythons() -> dict[str, str]:
    """Paths of the interpreters that have headers, by version, from PATH and from pyenv."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *Path.home().glob(".pyenv/versions/*/bin")]
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(Path(folder).glob("python3.[0-9]*")):
            version = path.name.removeprefix("python")
            if re.fullmatch(r"3\.\d+", version) and version not in found and _has_headers(path):
                found[version] = str(path)
    return found


def _has_headers(python: Path) -> bool:
    program = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "True"


def plan(pythons: dict[str, str]) -> list[Target]:
    """Wheels that can be built with the interpreters that are there.

    Raises:
        SystemExit: there is none for Python 3.11, or none for later ones.
    """
    later = [version for version in pythons if tuple(map(int, version.split("."))) >= (3, 12)]
    if "3.11" not in pythons or not later:
        raise SystemExit(
            "make wheels: Python 3.11 and one of 3.12 or later, with their headers, must be on PATH or in pyenv, found "
            f"{', '.join(pythons) or 'none'}"
        )
    oldest = pythons[min(later, key=lambda version: int(version.split(".")[1]))]
    return [
        Target(python, tag, architecture)
        for python, tag in ((pythons["3.11"], "cp311"), (oldest, "cp312-abi3"))
        for architecture in ARCHITECTURES
    ]


def write_tools(folder: Path, architecture: str) -> dict[str, str]:
    """Writes Zig's programs as a compiler, an archiver and a toolchain. Returns what CMake is to define."""
    zig = Path(ziglang.__file__).parent / "zig"
    programs = {"c++": f"c++ -target {architecture}-linux-gnu.{GLIBC}", "ar": "ar", "ranlib": "ranlib"}
    for name, words in programs.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{zig}" {words} "$@"\n')
        path.chmod(0o755)
    toolchain = folder / "toolchain.cmake"
    toolchain.write_text(
        f"set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR {architecture})\n"
        f'set(CMAKE_CXX_COMPILER "{folder / "c++"}")\n'
        f'set(CMAKE_AR "{folder / "ar"}" CACHE FILEPATH "")\n'
        f'set(CMAKE_RANLIB "{folder / "ranlib"}" CACHE FILEPATH "")\n'
    )
    return {"CMAKE_TOOLCHAIN_FILE": str(toolchain)}


def build(target: Target, folder: Path) -> Path:
    """Builds a wheel into `folder`."""
    tools = folder / "tools"
    tools.mkdir()
    settings = {f"cmake.define.{name}": value for name, value in write_tools(tools, target.architecture).items()}
    settings["build-dir"] = str(folder / "build")
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    if target.tag.endswith("abi3"):
        settings["wheel.py-api"] = target.tag.partition("-")[0]
    else:  # the name of a module says the processor, by default that of the machine that builds
        environment["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-311-{target.architecture}-linux-gnu.so"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        target.python,
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    command += [f"--config-settings={name}={value}" for name, value in settings.items()]
    subprocess.run(command, env=environment, check=True)
    return next(folder.glob("*.whl"))


def finish(wheel: Path, target: Target, folder: Path) -> Path:
    """Adds the licences of what is linked in, and the tag of the platform. Returns the wheel's new path."""
    run = [sys.executable, "-m", "wheel"]
    subprocess.run([*run, "unpack", "--dest", folder / "unpacked", wheel], check=True, stdout=subprocess.DEVNULL)
    content = next((folder / "unpacked").iterdir())
    described = next(content.glob("*.dist-info"))
    metadata = (described / "METADATA").read_text()
    for name, text in licences().items():
        (described / "licenses" / name).write_text(text)
        metadata = metadata.replace("License-File: LICENSE\n", f"License-File: LICENSE\nLicense-File: {name}\n", 1)
    (described / "METADATA").write_text(metadata)
    (folder / "packed").mkdir()
    subprocess.run([*run, "pack", "--dest-dir", folder / "packed", content], check=True, stdout=subprocess.DEVNULL)
    packed = next((folder / "packed").iterdir())
    done = subprocess.run(
        [*run, "tags", "--remove", "--platform-tag", target.platform, packed],
        check=True,
        capture_output=True,
        text=True,
    )
    return packed.with_name(done.stdout.split()[-1])


def run_native_tests(architecture: str) -> int:
    """Builds the native tests with the compiler of the wheels, and runs them. Returns how many programs have failed."""
    runner = [] if architecture == platform.machine() else emulator(architecture)
    if runner is None:
        print(f"native tests for {architecture}: not run, which takes qemu-user and libc6-arm64-cross", flush=True)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        defined = {"TRACKBED_PYTHON": "OFF", "TRACKBED_TESTS": "ON", "CMAKE_BUILD_TYPE": "Release"}
        options = [f"-D{key}={value}" for key, value in {**defined, **write_tools(folder, architecture)}.items()]
        cmake = [sys.executable, "-m", "cmake"]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        configure = [*cmake, "-S", ROOT / "native", "-B", folder / "build", "-G", "Ninja", *options]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env=environment)
        subprocess.run([*cmake, "--build", folder / "build"], check=True, stdout=subprocess.DEVNULL, env=environment)
        failed = 0
        for program, *arguments in (("test_kernels", "short"), ("test_files",), ("test_comm",)):
            print(f"{program} for {architecture}:", flush=True)
            failed += subprocess.run([*runner, folder / "build" / program, *arguments], check=False).returncode != 0
        return failed


def emulator(architecture: str) -> list[str] | None:
    """Returns the command that runs programs of another processor, or None if it is not installed."""
    libraries = Path(f"/usr/{architecture}-linux-gnu")
    program = shutil.which(f"qemu-{architecture}") or shutil.which(f"qemu-{architecture}-static")
    return [program, "-L", str(libraries)] if program and libraries.exists() else None


def licences() -> dict[str, str]:
    """Texts of the licences of what is linked into the modules, by name in the wheel."""
    libraries = Path(ziglang.__file__).parent / "lib"
    headers = Path(nanobind.__file__).parent
    robin_map = (headers / "ext" / "robin_map" / "include" / "tsl" / "robin_map.h").read_text().partition("*/")[0]
    return {
        "nanobind.txt": next(headers.parent.glob("nanobind-*.dist-info/licenses/LICENSE")).read_text(),
        "robin-map.txt": re.sub(r"^ \* ?", "", robin_map.removeprefix("/**\n"), flags=re.MULTILINE),
        **{
            f"{name}.txt": (libraries / name / "LICENSE.TXT").read_text()
            for name in ("libcxx", "libcxxabi", "libunwind")
        },
    }


def main() -> None:
    """Builds what can be built, checks it, and puts it into the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels and the sdist")
    parser.add_argument("--only", default="", help="part of the names of the wheels to build, such as cp311 or aarch64")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    if arguments.only in "sdist":
        with contextlib.chdir(ROOT):
            print(build_sdist(str(arguments.out.resolve())), flush=True)
    for architecture in ARCHITECTURES:
        wrong += run_native_tests(architecture) if arguments.only in architecture else 0
    for target in plan(find_pythons()):
        if arguments.only not in f"{target.tag}-{target.platform}":
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            wheel = finish(build(target, Path(name)), target, Path(name))
            found = problems(wheel)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {time.monotonic() - began:.0f} s", flush=True)
            print("".join(f"  {problem}\n" for problem in found), end="")
            wrong += len(found)
            if not found:
                shutil.move(wheel, arguments.out / wheel.name)
    if wrong:
        sys.exit(f"make wheels: {wrong} problems")


if __name__ == "__main__":
    main()
