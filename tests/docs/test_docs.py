"""What the documentation says is so: links lead somewhere, snippets run, public names are listed."""

import doctest
import json
import os
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from itertools import pairwise

import psutil
import pytest
import torch
from torch.distributed import checkpoint as dcp

import trackbed
from tests.docs.pages import README, ROOT, snippets, torchrun
from trackbed.blends import read_blend_file
from trackbed.ledger import read_run

PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for name in ("docs", "tests", "benchmarks", "examples", "native", "src")
        for page in (ROOT / name).rglob("*.md")
    ),
]


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


def test_the_reference_has_every_public_name(tmp_path):
    command = [sys.executable, str(ROOT / "docs" / "site" / "reference.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    pages = {page.stem: page.read_text() for page in tmp_path.iterdir()}
    named = {*re.findall(r"`(trackbed(?:\.\w+)?)`", (ROOT / "docs" / "reference" / "names.md").read_text())}
    assert set(pages) == named
    for facade, page in pages.items():
        names = re.findall(r"^### `(\w+)`$", page, flags=re.MULTILINE)
        assert sorted(names) == sorted(import_module(facade).__all__)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    code = " ".join(re.sub(r'"\s*\n\s*f?"', "", code).split())
    messages = re.findall(r"^### `(.*)`$", page, flags=re.MULTILINE)
    assert len(messages) >= 20
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in code, message


@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>> " in page.read_text()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_examples_give_what_the_page_says(page):
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0


def test_the_readmes_program_runs_and_goes_on_on_another_number_of_ranks(first_hour, tmp_path):
    (tmp_path / "web.jsonl").write_bytes((first_hour / "web.jsonl").read_bytes())
    for line in snippets("bash", README)[0].strip().splitlines():
        subprocess.run([sys.executable, "-m", *line.split()], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "blend.toml").write_text(snippets("toml", README)[0])
    program = snippets("python", README)[0]
    assert program.count("step % 100") == 1
    (tmp_path / "train.py").write_text(program.replace("step % 100", "step % 10"))
    assert "step 10: loss" in torchrun(tmp_path, "train.py", 2)
    assert "step 20: loss" in torchrun(tmp_path, "train.py", 1)
    assert trackbed.latest_checkpoint(tmp_path / "checkpoints").name == "step-0000020"


def test_the_readme_is_short():
    code = [part for _, part in re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)]
    num_words = sum(len(part.split()) for part in code)
    assert num_words <= 200
    assert len(README.split()) - num_words <= 1_100


def test_the_tutorials_first_program_runs_and_resumes_on_another_number_of_ranks(first_hour):
    assert len([line for line in (first_hour / "program.py").read_text().splitlines() if line]) <= 12
    (first_hour / "position.json").unlink(missing_ok=True)
    for ranks, consumed in ((1, 8), (2, 24), (1, 32)):
        output = torchrun(first_hour, "program.py", ranks)
        assert output.count("torch.Size([8, 512])") == 2 * ranks
        assert json.loads((first_hour / "position.json").read_text())["consumed_samples"] == consumed


@pytest.mark.slow  # another test trains by it on one rank and on two
def test_the_tutorials_training_goes_on_on_another_number_of_ranks(first_hour):
    assert len([line for line in (first_hour / "train.py").read_text().splitlines() if line]) <= 40
    (first_hour / "shorter.py").write_text((first_hour / "train.py").read_text().replace("step % 100", "step % 60"))
    first, second = torchrun(first_hour, "shorter.py", 2), torchrun(first_hour, "shorter.py", 1)
    losses = dict(re.findall(r"step (\d+): loss ([\d.]+)", first + second))
    assert list(losses) == [str(step) for step in range(20, 121, 20)]
    assert float(losses["120"]) < 0.7 * float(losses["20"])


def test_documents_are_kept_apart_as_the_page_says(first_hour, monkeypatch):
    page = (ROOT / "docs" / "how-to" / "feed-a-training-loop.md").read_text()
    (options,) = snippets("toml", page)
    attention, borders = snippets("python no-run", page)
    short = [{"text": f"{number} short. " * 5} for number in range(300)]
    (first_hour / "short.jsonl").write_text("".join(json.dumps(record) + "\n" for record in short))
    command = ["preprocess", "short.jsonl", "--tokenizer", "tokenizer.json", "--output", "short", "--append-eod"]
    subprocess.run([sys.executable, "-m", "trackbed", *command], cwd=first_hour, check=True, capture_output=True)
    blend = (first_hour / "blend.toml").read_text().split("[[dataset]]")[0]
    dataset = '[[dataset]]\npath = "short_text_document"\nweight = 1\n'
    (first_hour / "apart.toml").write_text(f"{blend}{options}create_cu_seqlens = true\n{dataset}")
    monkeypatch.chdir(first_hour)
    train = trackbed.open_blend("apart.toml").train
    batch = next(iter(trackbed.BatchLoader(train, batch_size=3)))
    assert batch["attention_mask"].shape == (3, 1, 512, 512)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(3, 2, 512, 8, generator=generator) for _ in range(3))
    found = {"torch": torch, "batch": batch, "query": query, "key": key, "value": value}
    exec(attention, found)
    exec(borders, found)
    eod = train.config.tokenizer.eod
    ends = [at + 1 for at, token in enumerate(batch["tokens"].flatten().tolist()) if token == eod or at % 512 == 511]
    assert found["borders"].tolist() == [0, *ends]
    assert len(ends) > 20
    assert found["longest"] == max(stop - start for start, stop in pairwise([0, *ends]))
    for start, stop in pairwise([0, *ends]):
        row, own = start // 512, slice(start % 512, (stop - 1) % 512 + 1)
        inputs = [part[row : row + 1, :, own] for part in (query, key, value)]
        alone = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        assert torch.allclose(found["hidden"][row, :, own], alone[0], atol=1e-5)
        assert batch["position_ids"][row, own].tolist() == list(range(stop - start))


@pytest.mark.slow
@pytest.mark.dist
def test_all_ranks_find_the_loss_of_validation_that_one_would(first_hour):
    evaluate, _ = snippets("python no-run", (ROOT / "docs" / "how-to" / "train-on-several-ranks.md").read_text())
    train, end = (first_hour / "train.py").read_text(), 'state = {"loader"'
    assert train.count(end) == 1
    program = train.replace(end, evaluate + end).replace("step % 100", "step % 20")
    found = []
    for ranks in (1, 2):
        (first_hour / "evaluate.py").write_text(program.replace("checkpoints", f"evaluated-on-{ranks}"))
        found.append(re.findall(r"validation loss ([\d.]+)", torchrun(first_hour, "evaluate.py", ranks)))
    assert len(found[0]) == 1
    assert found[1] == found[0]


def test_the_blend_file_of_the_page_on_object_stores_is_one(tmp_path):
    (text,) = snippets("toml", (ROOT / "docs" / "how-to" / "read-from-an-object-store.md").read_text())
    (tmp_path / "blend.toml").write_text(text)
    blend = read_blend_file(tmp_path / "blend.toml")
    assert blend.storage.path_to_idx_cache == "/scratch/idx"


@pytest.mark.slow
def test_the_tutorials_programs_have_types(first_hour):
    subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py", "train.py"], cwd=first_hour, check=True, timeout=300
    )


def test_the_line_that_shows_an_installation_beside_megatron_prints_what_the_page_says():
    page = (ROOT / "docs" / "how-to" / "move-from-megatron-lm.md").read_text()
    *_, line, said = snippets("console", page)[0].strip().splitlines()
    (program,) = re.fullmatch(r'\$ python -c "(.*)"', line).groups()
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == said


def test_the_way_into_megatron_runs():
    page = (ROOT / "docs" / "how-to" / "move-from-megatron-lm.md").read_text()
    subprocess.run([sys.executable, "-W", "ignore", "-c", snippets("python", page)[0]], check=True)


RECIPES = snippets("python", (ROOT / "docs" / "how-to" / "use-with-other-trainers.md").read_text())


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_the_recipes_for_other_trainers_run(first_hour, number):
    program = f"def main():\n{textwrap.indent(RECIPES[number], '    ')}\nif __name__ == '__main__':\n    main()\n"
    (first_hour / "recipe.py").write_text(program)  # worker processes import it
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "recipe.py"], cwd=first_hour, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().endswith(("24", "8", "}]", "True"))


@pytest.mark.slow
def test_the_recorded_run_goes_on(first_hour):
    (program,) = snippets("python", (ROOT / "docs" / "how-to" / "record-a-run.md").read_text())
    for steps in (20, 40):
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], cwd=first_hour, check=True, capture_output=True, text=True
        )
        assert found.stdout == f"{steps} steps\n"
    record = read_run(first_hour / "runs" / "first")
    assert [line["step"] for line in record.steps] == list(range(1, 41))
    assert record.superseded == []


@pytest.mark.slow
@pytest.mark.dist
def test_the_program_for_fsdp2_is_killed_and_goes_on_on_another_number_of_ranks(first_hour):
    program = (ROOT / "examples" / "fsdp2.py").read_text()
    (shown,) = snippets("python", (ROOT / "docs" / "how-to" / "use-fsdp2.md").read_text())
    assert program.endswith(shown)
    assert len(shown.splitlines()) <= 50
    (first_hour / "fsdp2.py").write_text(program)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, "fsdp2.py"],
        cwd=first_hour,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as ranks:
        assert next(line for line in ranks.stdout if "step 20" in line)  # whose save has waited for that of step 10
        for process in [*psutil.Process(ranks.pid).children(recursive=True), ranks]:  # in sessions of their own
            process.kill()
    saved = sorted(path.name for path in (first_hour / "checkpoints-fsdp2").glob("step-*"))
    assert saved[:1] == ["step-0000010"]
    assert not torchrun(first_hour, "fsdp2.py", 1).startswith("step 10")
    assert trackbed.load(first_hour / "checkpoints-fsdp2" / "step-0000030")["step"] == 30


@pytest.mark.slow  # the next test runs the first two
@pytest.mark.dist
def test_the_programs_before_and_after_the_move_from_pytorch_run(first_hour, tmp_path):
    before, after, checkpoints, old = snippets(
        "python", (ROOT / "docs" / "how-to" / "move-from-pytorch.md").read_text()
    )
    ends = (
        "\nimport json, os, pathlib\nsums = [p.double().sum().item() for p in module.parameters()]\n"
        "pathlib.Path(f'{os.environ[\"RANK\"]}.json').write_text(json.dumps(sums))\n"
    )
    sums = []
    for name, program in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        # torch's own wrappers abort at the end of the interpreter in some runs: "terminate called without ...".
        leave = "os._exit(0)\n" if name == "before" else ""
        (tmp_path / name / "program.py").write_text(program + ends + leave)
        torchrun(tmp_path / name, "program.py", 2)
        sums += [json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in range(2)]
    assert sums[1:] == [pytest.approx(sums[0], abs=1e-4)] * 3  # the same model
    own = checkpoints.replace('"checkpoints', '"torch-checkpoints')
    (first_hour / "checkpoints.py").write_text(own)
    for ranks, step in ((2, 10), (1, 20)):
        torchrun(first_hour, "checkpoints.py", ranks)
        state = trackbed.load(first_hour / "torch-checkpoints" / f"step-{step:07}")
        assert state["optimizer"]["state"][0]["step"] == step
        assert state["loader"]["consumed_samples"] == {10: 160, 20: 240}[step]
    (tmp_path / "before" / "checkpoint").rename(tmp_path / "checkpoint-of-dcp")
    show = "print([p.double().sum().item() for p in module.parameters()])"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{old}\n{show}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(found.stdout) == pytest.approx(sums[0])


@pytest.mark.slow
@pytest.mark.dist
def test_states_move_from_pytorch_as_the_page_says(tmp_path):
    """The states of three old optimizers are loaded, the training goes on, and torch reads what it saves."""
    page = (ROOT / "docs" / "how-to" / "move-from-pytorch.md").read_text()
    before, after, *_ = snippets("python", page)
    rows = page.split("| the old program had | the state |")[1].split("\n\n")[0]
    (consolidate,) = re.findall(r"`(optimizer\.consolidate_state_dict\(.*?\))`", rows)
    (save, *others) = re.findall(r"`(torch\.save\(.*?\))`", rows)
    assert set(others) == {save}
    (convert,) = re.findall(r"`(dcp_to_torch_save\(.*?\))`", rows)
    *loads, load_dcp = re.findall(r"`(torch\.load\(.*?)`", rows)
    assert set(loads) == {'torch.load("optimizer.pt", map_location="cpu")'}
    end = "dist.destroy_process_group()\n"
    old = (
        f"{consolidate}\nif dist.get_rank() == 0:\n    {save}\n"
        "adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)\nfor param in module.parameters():\n"
        "    param.grad = torch.ones_like(param)\nadamw.step()\n"
        'dcp.save({"model": module.state_dict(), "optimizer": adamw.state_dict()}, checkpoint_id="old")\n'
        "if dist.get_rank() == 0:\n    torch.save(adamw.state_dict(), 'adamw.pt')\n"
        f"    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n    {convert}\n"
    )
    leave = "import os\ndist.barrier()\nos._exit(0)\n"  # torch's own wrappers abort at the end in some runs
    (tmp_path / "before.py").write_text(before.replace(end, old + leave))
    torchrun(tmp_path, "before.py", 2)
    check = "".join(
        f"optimizer.load_full_state_dict({load})\n"
        f"saved = torch.load('{expected}')['state']\n"
        "found = optimizer.full_state_dict()['state']\n"
        "assert set(found) == {'weight', 'bias'} and len(saved) == 2\n"
        "for number, name in enumerate(('weight', 'bias')):\n"
        "    for key, value in saved[number].items():\n"
        "        torch.testing.assert_close(found[name][key], value, rtol=0, atol=0)\n"
        for load, expected in (
            (loads[0], "optimizer.pt"),
            ("torch.load('adamw.pt')", "adamw.pt"),
            (load_dcp, "adamw.pt"),
        )
    )
    start, loop = after.split("with model.guarded()")
    (tmp_path / "after.py").write_text(f"{start}{check}with model.guarded(){loop}")
    torchrun(tmp_path, "after.py", 2)
    saved = dcp.FileSystemReader(tmp_path / "checkpoints" / "step-0000010").read_metadata()
    tensors = {f"optimizer.state.{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in ("weight", "bias")}
    assert set(saved.state_dict_metadata) == {"model.weight", "model.bias"} | tensors


@pytest.mark.parametrize(
    "page",
    [
        "tokenise-a-corpus",
        "tokenise-on-a-cluster",
        "train-bert-and-t5",
        "move-from-dcp",
        "save-while-training-goes-on",
    ],
)
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
    assert re.search(r"\d+ cores and \d+ GiB", figures)
    assert set(re.findall(r"`make ([a-z-]+)`", figures)) == {"bench", "bench-full", "bench-grads", "bench-ckpt"}


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_page_on_checkpoints_runs_alone_and_its_program_on_two_ranks(tmp_path):
    page = (ROOT / "docs" / "how-to" / "save-and-load-checkpoints.md").read_text()
    programs = snippets("python", page)
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(programs)], cwd=tmp_path, check=True)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", programs[0].replace("step-0001000", "step-0002000")],
        cwd=tmp_path,
        check=True,
    )
    for line in "".join(snippets("console", page)).strip().splitlines():
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
