"""The pages of the documentation, and what tests do with their snippets."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, TUTORIAL = (ROOT / "README.md").read_text(), (ROOT / "docs" / "tutorial.md").read_text()


def snippets(language, text=TUTORIAL):
    """The fenced blocks of one language, in the tutorial if nothing else is said."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def how_to(page):
    """The text of a page."""
    return (ROOT / "docs" / "how-to" / f"{page}.md").read_text()


def torchrun(folder, program, ranks):
    """Runs a program on `ranks` ranks, and returns what it prints."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    found = subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), program],
        cwd=folder,
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout
