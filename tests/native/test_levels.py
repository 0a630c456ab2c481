"""The instruction levels that are found are those of the processor, whichever compiler has built the kernels."""

import platform
from pathlib import Path

import pytest

from trackbed.kernels import available_levels


def test_levels_are_those_that_linux_lists():
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("needs Linux on x86-64")
    line = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    flags = set(line.split())
    wanted = ["baseline"]
    wanted += ["avx2"] if "avx2" in flags else []
    wanted += ["avx512"] if {"avx512f", "avx512dq", "avx512vl"} <= flags else []
    assert list(available_levels()) == wanted
