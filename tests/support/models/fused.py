"""Finding fused multiply-adds in compiled code: they round once where a product and a sum round twice."""

import re
import shutil
import subprocess
from pathlib import Path

# x86-64: vfmadd132pd, vfmsub..., vfnmadd..., vfmaddsub...; arm64: fmadd, fmsub, fnmadd, fnmsub, fmla, fmls.
_FUSED = re.compile(r"^ *[0-9a-f]+:\t[^\t]*\t(v?fn?m(?:add|sub|la|ls|ad|sb)\w*)", re.MULTILINE)
_ANY = re.compile(r"^ *[0-9a-f]+:\t[^\t]*\t\w+", re.MULTILINE)


def fused_instructions(path: Path, objdump: str = "objdump") -> tuple[list[str], int]:
    """The fused multiply-adds in a library, program or object, and how many instructions there are."""
    listing = subprocess.run([objdump, "-d", str(path)], capture_output=True, text=True, check=True).stdout
    return _FUSED.findall(listing), len(_ANY.findall(listing))


def missing(*programs: str) -> list[str]:
    """Those of the programs that are not installed."""
    return [program for program in programs if shutil.which(program) is None]
