"""The page on the command line: its commands are those that there are, and its lines for bash work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trackbed.cli.main import trackbed

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "use-the-command-line.md").read_text()


def test_every_command_has_a_line():
    rows = PAGE.split("| command |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", rows, flags=re.MULTILINE) == list(trackbed.commands)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_lines_for_bash_complete_commands(tmp_path):
    (lines,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) == 3
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "trackbed"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trackbed "$@"\n')
    program.chmod(0o755)
    ask = (
        '. ~/.bashrc\nCOMP_WORDS=(trackbed pre) COMP_CWORD=1\n_trackbed_completion trackbed\necho "${COMPREPLY[@]}"\n'
        "complete -p trackbed\n"
    )
    found = subprocess.run(
        ["bash", "-e"],
        input=lines + ask,
        env={**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    reply, registered = found.stdout.splitlines()
    assert reply == "preprocess"
    assert "_trackbed_completion" in registered
