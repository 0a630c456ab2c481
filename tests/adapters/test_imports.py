"""The rest of Trackbed needs no trainer."""

import subprocess
import sys

import pytest

TRAINERS = ("grain", "torchtitan", "accelerate", "pytorch_lightning", "lightning")


@pytest.mark.slow
def test_nothing_but_the_adapters_imports_a_trainer():
    program = f"""
import importlib, pkgutil, sys
for name in {TRAINERS}:
    sys.modules[name] = None
import trackbed
for module in pkgutil.walk_packages(trackbed.__path__, "trackbed."):
    if not module.name.startswith(("trackbed.adapters.", "trackbed.__main__")):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # of a kernel for GPUs
            if error.name != "triton":
                raise
import trackbed.adapters
for name in ("grain", "torchtitan", "accelerate", "lightning"):
    try:
        importlib.import_module(f"trackbed.adapters.{{name}}")
    except ImportError:
        continue
    raise SystemExit(f"trackbed.adapters.{{name}} does not need {{name}}")
"""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
