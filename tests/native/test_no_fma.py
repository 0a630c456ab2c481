"""Tests that the extension contains no fused multiply-add.

Sample i of a blend comes from argmax(weight * i - drawn), with product and difference rounded separately. A compiler
that fuses them changes some 40 % of a blend, on some machines only.
"""

import platform
import subprocess
from pathlib import Path

import pytest

from tests.support.models.fused import fused_instructions, missing
from trackbed.kernels import _native

SOURCE = """
double scalar(double a, double b, double c) { return a * b - c; }
void vector(double* a, const double* b) { for (int i = 0; i < 64; ++i) a[i] = b[i] * 3.0 - a[i]; }
"""


@pytest.mark.skipif(missing("objdump") != [], reason="objdump is not installed")
def test_the_extension_has_no_fused_multiply_add():
    fused, num_instructions = fused_instructions(Path(_native.__file__))
    assert fused == []
    assert num_instructions > 1000  # the listing was read


@pytest.mark.skipif(missing("objdump", "g++") != [], reason="objdump or g++ is not installed")
@pytest.mark.parametrize(("contract", "is_found"), [("fast", True), ("off", False)])
@pytest.mark.parametrize("level", ["-mfma", "-mavx512f"])
def test_the_check_finds_what_a_compiler_fuses(tmp_path, contract, is_found, level):
    flags = {"x86_64": [level], "aarch64": []}.get(platform.machine())
    if flags is None:
        pytest.skip(f"no fused instructions are known for {platform.machine()}")
    (tmp_path / "product.cpp").write_text(SOURCE)
    command = ["g++", "-O3", f"-ffp-contract={contract}", *flags, "-c", "product.cpp", "-o", "product.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    fused, num_instructions = fused_instructions(tmp_path / "product.o")
    assert (len(fused) >= 2) is is_found
    assert num_instructions > 4
