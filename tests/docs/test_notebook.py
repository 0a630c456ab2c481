"""The notebook of the tutorial runs from top to bottom."""

import os
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


def test_the_notebook_is_kept_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # that has trackbed
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [
        "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    said = "\n".join(outputs)
    assert "goes on behind step 40" in said
    assert "100 steps, 10 of them trained twice, on the same samples: True" in said
    assert "prose.jsonl" in said or "code.jsonl" in said
    assert (tmp_path / "first-hour" / "run" / "report.html").exists()
    assert not [one for one in said.splitlines() if one.startswith(("Error", "trackbed:"))]
