"""The folder of the tutorial, with what its commands make."""

import json
import subprocess
import sys

import pytest

from tests.docs.pages import snippets


@pytest.fixture(scope="module")
def first_hour(tmp_path_factory):
    """A folder in which the tutorial's commands have run, and its blend file and programs lie."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, word in (("web", "page"), ("books", "chapter")):
        texts = [f"{word} {number}: the quick brown fox jumps over the lazy dog. " * 40 for number in range(400)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (shell,) = snippets("bash")
    for line in shell.strip().splitlines():
        program, *arguments = line.split("#")[0].split()
        assert program == "trackbed"
        subprocess.run([sys.executable, "-m", "trackbed", *arguments], cwd=folder, check=True, capture_output=True)
    (blend,) = snippets("toml")
    (folder / "blend.toml").write_text(blend)
    for command in ("blend", "build"):
        subprocess.run([sys.executable, "-m", "trackbed", command, "blend.toml"], cwd=folder, check=True)
    for name, program in zip(("program.py", "train.py"), snippets("python"), strict=False):
        (folder / name).write_text(program)
    return folder
