"""What the documentation says is so: links lead somewhere, snippets run, public names are listed."""

import doctest
import json
import os
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for name in ("docs", "tests", "benchmarks", "examples", "native", "src")
        for page in (ROOT / name).rglob("*.md")
    ),
]
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "reference" / "api.md").read_text()
FACADES = re.findall(r"^## `(trackbed\.\w+)`$", API, flags=re.MULTILINE)


def snippets(language, text=README):
    """The fenced blocks of one language, in the README if nothing else is said."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            assert (page.parent / path).exists(), target
            assert not anchor or anchor in anchors(page.parent / path if path else page), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_that_are_named_are_there(page):
    if page.name in ("CHANGELOG.md",):
        pytest.skip("a changelog speaks of what was")
    assert set(re.findall(r"\b[\w-]+\.md\b", page.read_text())) <= {one.name for one in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_are_named_are_there(page):
    if page.name in ("CHANGELOG.md",):
        pytest.skip("a changelog speaks of what was")
    for path in re.findall(r"`((?:src|tests|docs|native|benchmarks|examples|quality)/[\w./-]*\w/?)`", page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("facade", FACADES)
def test_a_facade_has_the_names_that_the_reference_lists(facade):
    section = API.split(f"## `{facade}`")[1].split("\n## ")[0]
    module = import_module(facade)
    assert re.findall(r"^- `(\w+)`$", section, flags=re.MULTILINE) == module.__all__
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>> " in page.read_text()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_examples_give_what_the_page_says(page):
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0


def test_the_readmes_commands_and_programs_run(tmp_path):
    for name, word in (("web", "page"), ("books", "chapter")):
        texts = [f"{word} {number}: the quick brown fox jumps over the lazy dog. " * 40 for number in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (shell,) = snippets("bash")
    for line in shell.strip().splitlines():
        program, *arguments = line.split("#")[0].split()
        assert program == "trackbed"
        subprocess.run([sys.executable, "-m", "trackbed", *arguments], cwd=tmp_path, check=True, capture_output=True)
    programs = "\n".join(snippets("python"))
    checks = "\nassert len(train) >= 1000 and batch['tokens'].shape == (4, 512) and state['consumed_samples'] == 4"
    subprocess.run([sys.executable, "-W", "ignore", "-c", programs + checks], cwd=tmp_path, check=True)


@pytest.mark.parametrize("page", ["tokenise-a-corpus", "tokenise-on-a-cluster", "train-bert-and-t5"])
def test_the_program_of_a_page_runs(page, tmp_path):
    program = "".join(snippets("python", (ROOT / "docs" / "how-to" / f"{page}.md").read_text()))
    main = f"def main():\n{textwrap.indent(program, '    ')}\nif __name__ == '__main__':\n    main()\n"
    (tmp_path / "program.py").write_text(main)  # worker processes import it
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_the_example_trains_bert_and_t5(tmp_path):
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_masked.py"), "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets, page


def test_the_readme_says_what_was_measured_and_where():
    figures = README.split("## Figures")[1].split("## ")[0]
    assert "| times better |" in figures
    assert re.search(r"on .*, \d+ cores, \d+ GiB", figures)


def test_the_page_on_training_runs_alone_and_its_loop_on_two_ranks(tmp_path):
    programs = snippets("python", (ROOT / "docs" / "how-to" / "train-on-several-ranks.md").read_text())
    whole = tmp_path / "whole.py"
    whole.write_text("\n".join(programs))
    subprocess.run([sys.executable, "-W", "ignore", whole], cwd=tmp_path, check=True)
    assert '"traceEvents"' in (tmp_path / "trace.json").read_text()
    loop = tmp_path / "loop.py"
    loop.write_text(programs[0])
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, loop], cwd=tmp_path, check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_page_on_checkpoints_runs_alone_and_its_program_on_two_ranks(tmp_path):
    page = (ROOT / "docs" / "how-to" / "save-and-load-checkpoints.md").read_text()
    programs = snippets("python", page)
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(programs)], cwd=tmp_path, check=True)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", programs[0].replace("step-1000", "step-2000")], cwd=tmp_path, check=True
    )
    (console,) = snippets("console", page)
    for line in console.strip().splitlines():
        program, *arguments = line.removeprefix("$ ").split("#")[0].split()
        assert program == "trackbed"
        run = subprocess.run([sys.executable, "-m", "trackbed", *arguments], cwd=tmp_path, check=False)
        assert run.returncode == (1 if "diff" in arguments else 0), line  # other random numbers
    setup = "import torch\ntorch.distributed.init_process_group('gloo')\n"
    ranks = "rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()"
    loop = tmp_path / "loop.py"
    loop.write_text(
        setup + programs[0].replace("rank, size = 0, 1", ranks) + "torch.distributed.destroy_process_group()\n"
    )
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, loop], cwd=tmp_path, check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
