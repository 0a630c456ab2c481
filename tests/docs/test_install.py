"""The way into a container that pins its packages is as the page of versions says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "versions.md").read_text()
OFFLINE = "install --dry-run --no-index --no-build-isolation"


@pytest.fixture
def container(tmp_path):
    """Environment variables of a container: a torch of its own, and pins that Trackbed's dependencies do not meet."""
    (version,) = re.findall(r"`(2\.10\.0a0\+\S+)`", PAGE)
    described = tmp_path / "packages" / f"torch-{version}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (described / "INSTALLER").write_text("pip\n")
    (described / "RECORD").touch()
    (tmp_path / "pins.txt").write_text(f"click==8.0.0\nisal==1.6.0\ntorch=={version}\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(described.parent),
        "PIP_CONSTRAINT": str(tmp_path / "pins.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def shell(command, container, tmp_path):
    """Runs a command beside a link to the repository, with nothing fetched and nothing installed."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "src", "native"):
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    command = command.replace("pip install", f"pip {OFFLINE}")
    return subprocess.run(command, shell=True, cwd=tmp_path, env=container, capture_output=True, text=True)


def test_pins_of_a_container_refuse_trackbed_until_they_are_emptied_and_its_torch_stays(container, tmp_path):
    lines = re.findall(r"^\$ (.+)$", PAGE.split("## In a container that has torch")[1], flags=re.MULTILINE)
    refused = shell("pip install '.[text]'", container, tmp_path)
    assert refused.returncode == 1
    assert "ResolutionImpossible" in refused.stderr
    name, install, _ = lines
    assert shell(name, container, tmp_path).returncode == 0
    assert (tmp_path / "torch.txt").read_text().startswith("torch==2.10.0a0+")
    done = shell(install, container, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Would install trackbed-\S+$", done.stdout, flags=re.MULTILINE), done.stdout
