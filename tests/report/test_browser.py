"""The report of a run in Chromium, on the screens of a telephone and of a desk: see `docs/site/browse.py`."""

import shutil
import subprocess
from pathlib import Path

import pytest

import trackbed
from tests.ledger.run_rank import GLOBAL_BATCH, losses_of
from trackbed.report.write import write_report

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-site" / "bin" / "python"
needs_browser = pytest.mark.skipif(
    not PYTHON.exists() or shutil.which("chromium") is None, reason="needs `make site` and Debian's chromium"
)


@needs_browser
def test_a_report_shows_in_a_browser_without_an_error(folder, tmp_path):
    with trackbed.open_run(tmp_path / "run", blend=folder / "blend.toml") as run:
        run.set_weights(11, {"a": 1, "b": 3}, ramp_samples=80)
        for _, batch in zip(range(25), run.loader(batch_size=GLOBAL_BATCH), strict=False):
            run.record(losses_of(batch), grad_norm=0.5, checkpoint_seconds=0.25, lr=0.001, memory_bytes=3 << 30)
    (tmp_path / "pages").mkdir()
    shutil.copy(write_report(tmp_path / "run"), tmp_path / "pages" / "report.html")
    command = [PYTHON, ROOT / "docs" / "site" / "browse.py", tmp_path / "pages"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "1 pages at 2 widths, 0 problems" in found.stdout


WRONG = {
    '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">': "a picture must have a text",
    "<svg width=10 height=10></svg>": "a drawing must have a text",
    '<p style="width: 2000px">wide</p>': "must be no wider than 400 pixels",
    '<p style="font-size: 6px">small</p>': "text must be 12 pixels high",
    "<script>missing()</script>": "must run without an error",
    '<img alt="a" src="http://127.0.0.1:1/a.png">': "must ask no other host",
    '<img alt="a" src="missing.png">': "must find",
}


@needs_browser
def test_what_is_wrong_with_a_page_is_found(tmp_path):
    for number, body in enumerate(WRONG):
        (tmp_path / f"{number}.html").write_text(f"<!doctype html><meta charset=utf-8><title>page</title>{body}")
    command = [PYTHON, ROOT / "docs" / "site" / "browse.py", tmp_path]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    for number, problem in enumerate(WRONG.values()):
        assert f"{number}.html at 400 pixels: {problem}" in found.stderr
