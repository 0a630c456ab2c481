"""README and tutorial followed by a newcomer: from a fresh clone to a first batch, and to a model that is resumed."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README, TUTORIAL = (ROOT / "README.md").read_text(), (ROOT / "docs" / "tutorial.md").read_text()
FIRST_BATCH_SECONDS = 180
TRAINED_SECONDS = 300


def blocks(language, text=TUTORIAL):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_a_first_batch_within_three_minutes_and_a_resumed_model_within_five(tmp_path, capsys):
    clone, data = tmp_path / "trackbed", tmp_path / "data"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    data.mkdir()
    for name in ("web", "books"):
        lines = (json.dumps({"text": f"{name} {number}: the quick brown fox. " * 200}) + "\n" for number in range(4000))
        (data / f"{name}.jsonl").write_text("".join(lines))
    (data / "blend.toml").write_text(blocks("toml")[0])
    for name, program in zip(("program.py", "train.py"), blocks("python"), strict=False):
        (data / name).write_text(program)

    binaries = tmp_path / "venv" / "bin"
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("VIRTUAL_ENV", "PYTHONPATH", "RES_OPTIONS")
        },
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),  # the variant of torch that this machine needs
        "OMP_NUM_THREADS": "1",
    }

    def run(command, folder):
        found = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, executable="/bin/bash"
        )
        assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"
        return found.stdout

    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(binaries.parent)], check=True)
    for line in blocks("console", README)[0].splitlines():
        command = line.removeprefix("$ ").split("#")[0].strip()
        if command.startswith(("pip", "trackbed")):
            run(command.replace("install torch", "install torch==2.13.0"), clone)
    installed = time.monotonic() - started
    for line in blocks("bash")[0].strip().splitlines():
        run(line, data)
    assert "torch.Size([8, 512])" in run("python program.py", data)
    first_batch = time.monotonic() - started
    (console,) = [block for block in blocks("console") if "train.py" in block]
    output = "".join(run(line.removeprefix("$ ").split("#")[0], data) for line in console.strip().splitlines())
    trained = time.monotonic() - started
    assert re.findall(r"step (\d+)", output) == [str(step) for step in range(20, 201, 20)]
    with capsys.disabled():
        print(f"\ninstalled {installed:.0f} s, first batch {first_batch:.0f} s, trained and resumed {trained:.0f} s")
    assert first_batch < FIRST_BATCH_SECONDS
    assert trained < TRAINED_SECONDS
