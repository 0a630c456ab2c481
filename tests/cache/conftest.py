"""File systems of a few KiB, and such that cannot be written to, where tests may mount them."""

import contextlib
import os
import subprocess

import pytest


def mount(*arguments):
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine does not let tests mount: {done.stderr.decode().strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts an empty file system of some size."""
    with contextlib.ExitStack() as mounted:

        def make(size):
            disk = tmp_path / f"disk-{size}"
            disk.mkdir()
            mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk)
            mounted.callback(subprocess.run, ["umount", "--lazy", disk], check=True)
            return disk

        yield make


@pytest.fixture
def read_only(tmp_path):
    """Mounts a folder somewhere else, where not even root may write to it."""
    with contextlib.ExitStack() as mounted:

        def make(folder):
            view = tmp_path / "read-only"
            view.mkdir()
            mount("--bind", folder, view)
            mounted.callback(subprocess.run, ["umount", "--lazy", view], check=True)
            mount("-o", "remount,bind,ro", view)
            return view

        yield make
