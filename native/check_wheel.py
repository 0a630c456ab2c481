"""Checks of a wheel before it is published, which `make wheels` runs on each one."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import capstone
from elftools.elf.elffile import ELFFile

LARGEST_BYTES = 3 << 20
NEWEST_GLIBC = (2, 28)
MODULES = 3
# x86-64: vfmadd132pd, vfmsub..., vfnmadd...; arm64: fmadd, fmsub, fnmadd, fnmsub, fmla, fmls.
_FUSED = re.compile(r"v?fn?m(?:add|sub|la|ls|ad|sb)\w*")
_DECODERS = {
    "EM_X86_64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
    "EM_AARCH64": (capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM),
}
# What is linked into the modules, by the name of its licence's file.
LICENCES = ("LICENSE", "nanobind.txt", "robin-map.txt", "libcxx.txt", "libcxxabi.txt", "libunwind.txt")


def problems(wheel: Path) -> list[str]:
    """Returns one sentence for each thing about a wheel that is not as it must be."""
    found = []
    if wheel.stat().st_size > LARGEST_BYTES:
        found.append(f"must have at most {LARGEST_BYTES} bytes, found {wheel.stat().st_size}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modules = [name for name in names if name.endswith(".so")]
        if len(modules) != MODULES:
            found.append(f"must have {MODULES} extension modules, found {modules}")
        licences = {Path(name).name for name in names if ".dist-info/licenses/" in name}
        found += [f"must have the licence {name}" for name in LICENCES if name not in licences]
        for name in modules:
            with archive.open(name) as file:
                found += [f"{name}: {problem}" for problem in _problems_of_module(ELFFile(file), name, wheel.name)]
    if "abi3" in wheel.name:
        done = subprocess.run(
            [sys.executable, "-m", "abi3audit", "--strict", str(wheel)], capture_output=True, text=True, check=False
        )
        found += [f"abi3audit: {done.stdout}{done.stderr}"] if done.returncode else []
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
    ).stdout
    policy = re.search(r"manylinux_2_(\d+)_", shown.replace("\n", " ").partition("consistent with")[2])
    if policy is None or int(policy[1]) > NEWEST_GLIBC[1]:
        found.append(f"auditwheel must find it consistent with manylinux_2_{NEWEST_GLIBC[1]}, found: {shown}")
    return found


def _problems_of_module(elf: ELFFile, name: str, wheel: str) -> list[str]:
    found = []
    architecture = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}[elf["e_machine"]]
    if architecture not in wheel:
        found.append(f"must be for the processor in the wheel's tag, found {architecture}")
    suffix = ".abi3.so" if "abi3" in wheel else f".cpython-311-{architecture}-linux-gnu.so"
    if not name.endswith(suffix):
        found.append(f"must end with {suffix}")
    needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
    found += [f"must not need a library of C++, found {library}" for library in needed if "c++" in library]
    for _, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
        for version in versions:
            number = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
            if number and (int(number[1]), int(number[2])) > NEWEST_GLIBC:
                found.append(
                    f"must need nothing newer than glibc {NEWEST_GLIBC[0]}.{NEWEST_GLIBC[1]}, found {version.name}"
                )
    fused, count = fused_instructions(elf)
    if fused or count < 1000:
        found.append(f"must have no fused multiply-add, found {fused[:3]} in {count} instructions")
    return found


def fused_instructions(elf: ELFFile) -> tuple[list[str], int]:
    """Returns the fused multiply-adds of a module, and how many instructions it has.

    They round once where a product and a sum round twice, which changes the order of a blend.
    """
    decoder = capstone.Cs(*_DECODERS[elf["e_machine"]])
    decoder.skipdata = True
    text = elf.get_section_by_name(".text")
    fused, count = [], 0
    for _, _, mnemonic, _ in decoder.disasm_lite(text.data(), text["sh_addr"]):
        count += 1
        if _FUSED.fullmatch(mnemonic):
            fused.append(mnemonic)
    return fused, count


if __name__ == "__main__":
    wrong = [f"{path}: {problem}" for path in sys.argv[1:] for problem in problems(Path(path))]
    print("\n".join(wrong))
    sys.exit(bool(wrong))
