"""Snippets that are parts of programs or command lines, with the objects that they speak of."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.docs.pages import README, ROOT, how_to, snippets
from tests.support.stores.servers import use_endpoint
from trackbed.cli.main import trackbed as trackbed_command

SETUP = """
import contextlib, copy, os, signal
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save as dcp_save
import trackbed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def build():
    module = torch.nn.Sequential(torch.nn.Embedding(2048, 8), torch.nn.Linear(8, 2048))
    config = trackbed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = trackbed.DistributedDataParallel(module, config)
    return module, model, trackbed.DataParallelOptimizer(torch.optim.AdamW(module.parameters()), model)

module, model, optimizer = build()
step = 0
"""
END = """
dist.destroy_process_group()
print("the end")
os._exit(0)
"""


def run(folder, *parts):
    """Runs the parts of a program in one process of one rank."""
    (folder / "fragments.py").write_text("".join([SETUP, *parts, END]))
    command = [sys.executable, "-W", "ignore", "fragments.py"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith("the end\n")
    return found.stdout


def indented(text, head):
    return head + "".join(f"    {line}\n" for line in text.splitlines())


def test_the_readmes_lines_for_megatron_are_those_of_the_page():
    assert snippets("python", README)[1] == snippets("python", how_to("move-from-megatron-lm"))[0]


def test_the_parts_of_the_page_on_checkpoints_run(tmp_path):
    short, several, own, remove = snippets("python no-run", how_to("save-and-load-checkpoints"))
    run(
        tmp_path,
        short,
        "assert state == {'step': 100}, state\n",
        "g, g_optimizer, averaged = model, optimizer, copy.deepcopy(module)\n",
        several.replace("checkpoints/", "several/"),
        """
class Parallel(torch.nn.Linear):
    def sharded_state_dict(self):
        return {key: trackbed.ShardedTensor.from_rank_offsets(key, value) for key, value in self.state_dict().items()}

module = Parallel(8, 8)
model = trackbed.DistributedDataParallel(module, trackbed.DistributedDataParallelConfig(use_distributed_optimizer=True))
optimizer = trackbed.DataParallelOptimizer(torch.optim.AdamW(module.parameters()), model)
""",
        own.replace("checkpoints/", "own/"),
        "for number in range(200, 600, 100):\n    trackbed.save({'step': number}, f'checkpoints/step-{number:07}')\n",
        remove,
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{number:07}" for number in (300, 400, 500)
    ]


def test_the_parts_of_the_page_on_torch_run(first_hour):
    gather, old, consolidated = snippets("python no-run", how_to("move-from-pytorch"))
    run(
        first_hour,
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW)\n"
        "loader = trackbed.BatchLoader(trackbed.open_blend('blend.toml').train, batch_size=2)\n",
        gather,
        "assert others['optimizer']['param_groups']\n",
        "dcp_save({'model': {f'module.{k}': v for k, v in module.state_dict().items()}}, "
        "checkpoint_id='checkpoint-of-dcp')\n",
        old,
        "torch.save({f'model.{k}': v for k, v in module.state_dict().items()}, 'checkpoint.pt')\n",
        consolidated,
    )


def test_the_parts_of_other_pages_run(first_hour):
    (_, signals) = snippets("python no-run", how_to("train-on-several-ranks"))
    guarded, hook = snippets("python no-run", how_to("move-from-megatron-lm"))
    (config,) = snippets("python no-run", how_to("use-with-other-trainers"))
    hook = hook.replace("pinned=True", "pinned=False")  # which asks for a GPU
    run(
        first_hour,
        "def steps():\n    for one in range(3):\n        os.kill(os.getpid(), signal.SIGTERM)\n        yield one\n"
        "loader = steps()\n",
        signals.replace("checkpoints/", "signalled/"),
        "assert step == 1\nwhole = model\n",
        "model, iteration, args = [model], 20, SimpleNamespace(train_iters=20, micro_batch_size=2)\n",
        guarded,
        "mpu = SimpleNamespace(get_data_parallel_rank=lambda: 0, get_data_parallel_world_size=lambda: 1)\n",
        indented(hook, "def build_loader(dataset, consumed_samples):\n"),
        "batch = next(iter(build_loader(trackbed.open_blend('blend.toml').train, 4)))\n"
        "assert batch['tokens'].shape == (2, 512)\n",
        "from trackbed.adapters.torchtitan import BlendDataLoader, FolderCheckpointManager\n"
        "config = SimpleNamespace()\n",
        config,
        "assert config.checkpoint.interval == 500\n",
    )


@pytest.mark.slow
def test_the_pages_on_resuming_and_on_the_loaders_speed_run(first_hour):
    (program,) = snippets("python", how_to("resume-and-move"))
    (speed,) = snippets("python", how_to("find-the-bottleneck"))
    (first_page,) = snippets("python", (ROOT / "docs" / "site" / "index.md").read_text())
    said = run(
        first_hour,
        indented(f"{program}\nsteps.append(run.step)\n", "def train():\n"),
        "steps = []\ntrain()\ntrain()\nassert steps == [10, 20], steps\n",
        speed,
        "losses = 0.5\n",
        first_page.replace("...", "if run.step == 3: break\n        ..."),
        "assert run.step == 3\n",
    )
    assert re.search(r"^[\d,]+ samples/s$", said, flags=re.MULTILINE)


def test_the_page_on_stores_runs(moto_endpoint, bucket, monkeypatch, tmp_path):
    use_endpoint(monkeypatch, moto_endpoint)
    page = how_to("checkpoints-in-object-stores").replace("s3://models", f"s3://{bucket.name}")
    alone, mirrored = snippets("python", page.replace("/scratch/run-7", str(tmp_path / "run-7")))
    run(
        tmp_path,
        "step = 5\n",
        alone,
        "assert trackbed.latest_checkpoint('" + f"s3://{bucket.name}/run-7').endswith('step-0000005')\n",
        alone,
        mirrored,
    )
    for line in snippets("console", page)[1].splitlines():
        check(line)


def check(line):
    """Runs a command line of a page."""
    program, *arguments = shlex.split(line.removeprefix("$ "), comments=True)
    assert program == "trackbed"
    found = CliRunner().invoke(trackbed_command, arguments)
    assert found.exit_code == 0, f"{line}\n{found.output}"
    return found.output


@pytest.fixture
def corpus(first_hour, monkeypatch):
    """The folder of the tutorial, with what other pages speak of."""
    monkeypatch.chdir(first_hour)
    Path("corpus").mkdir(exist_ok=True)
    return first_hour


def test_the_commands_of_the_page_on_token_files_run(corpus):
    (corpus / "corpus" / "web.jsonl").write_bytes((corpus / "web.jsonl").read_bytes())
    page = how_to("tokenise-a-corpus")
    lines = [
        line for block in snippets("console", page) for line in block.splitlines() if line.startswith("$ trackbed")
    ]
    assert len(lines) == 5
    trained, plain, keys, sentences, _ = lines
    small = trained.replace("32000", "2048").replace("tokenizer.json", "another.json")
    for line in (small, plain, sentences):
        check(line)
    (corpus / "corpus" / "web.jsonl").write_text('{"question": "a fox", "answer": "a dog"}\n' * 20)
    check(keys)
    assert (corpus / "out" / "web_question_document.idx").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_on_the_record_run(corpus, monkeypatch):
    (program,) = snippets("python", how_to("record-a-run"))
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=corpus, check=True)
    look, report = snippets("console", how_to("record-a-run"))
    show, of_rank, where, follow = look.strip().splitlines()
    assert follow.startswith("$ tail -f")
    assert "web_text_document" in check(show)
    assert "web_text_document" in check(of_rank.replace("--rank 1", "--rank 0"))  # the run had one
    assert "step" in check(where.replace("data/code_text_document", "web_text_document"))
    for line in report.strip().splitlines():
        check(line)
    assert (corpus / "first.html").exists()


def test_the_page_on_packs_runs(first_hour):
    page = how_to("pack-documents")
    (blend,) = snippets("toml", page)
    (first_hour / "packed.toml").write_text(blend)
    parts = snippets("python", page)
    assert len(parts) == 5  # read, write, train, attend and balance
    said = run(first_hour, *parts)
    assert "torch.Size([1, 2048]) 2048\n" in said
    assert " trained labels of " in said
    assert (first_hour / "chat.mask").exists()
    line, shown = snippets("console", page)[0].strip().splitlines()
    command = shlex.split(line.removeprefix("$ trackbed "))
    done = subprocess.run(
        [sys.executable, "-m", "trackbed", *command], cwd=first_hour, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(shown.removesuffix("..."))


def test_the_page_on_conversations_runs(first_hour, monkeypatch):
    page = how_to("fine-tune-on-conversations")
    monkeypatch.chdir(first_hour)
    (record,), (template,) = snippets("json", page), snippets("jinja", page)
    (first_hour / "talks.jsonl").write_text(record)
    (first_hour / "template.jinja").write_text(template)
    (first_hour / "plain.jinja").write_text(re.sub("{% (end)?generation %}", "", template))
    first, by_turns = snippets("console", page)
    masks = []
    for lines in (first, by_turns):
        subprocess.run(
            ["bash", "-ec", lines.replace("$ trackbed", f"{sys.executable} -m trackbed")], check=True, timeout=120
        )
        masks.append((first_hour / "talks_chat_document.mask").read_bytes())
    assert masks[0] == masks[1]
    (blend,) = snippets("toml", page)
    (first_hour / "talks.toml").write_text(blend)
    assert " trained labels in 4 samples" in run(first_hour, *snippets("python", page))
