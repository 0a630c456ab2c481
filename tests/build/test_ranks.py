"""Under more than one rank, in real processes: each rank opens a complete cache by itself."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from blends import build, gpt_config, tokens_of, write_pairs

pytestmark = pytest.mark.dist

RANK = """
import json, sys
import torch.distributed
sys.path.insert(0, sys.argv[1])
from blends import BlendedMegatronDatasetBuilder, GPTDataset, gpt_config, tokens_of
from pathlib import Path

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
cache, prefixes, absent = Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
try:
    config = gpt_config(cache, blend=(prefixes, [3, 2, 1]), split="8,1,1")
    built = BlendedMegatronDatasetBuilder(GPTDataset, [50, 5, 5], lambda: rank not in absent, config).build()
    found = [None if dataset is None else tokens_of(dataset, range(5)) for dataset in built]
except Exception as error:
    found = f"{type(error).__name__}: {error}"
Path(f"{cache}.rank{rank}").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""


def run_ranks(cache, prefixes, *, absent=(), size=2):
    """What each of `size` processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(Path(__file__).parents[1]), str(cache), json.dumps(prefixes), json.dumps(list(absent))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(size)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0] * size
    return [json.loads(Path(f"{cache}.rank{rank}").read_text()) for rank in range(size)]


def test_ranks_open_what_one_process_built(tmp_path):
    prefixes = write_pairs(tmp_path)
    alone = build(gpt_config(tmp_path / "cache", blend=(prefixes, [3, 2, 1]), split="8,1,1"))
    wanted = [tokens_of(dataset, range(5)) for dataset in alone]
    assert run_ranks(tmp_path / "cache", prefixes) == [wanted, wanted]


def test_a_rank_that_does_not_want_datasets_gets_none(tmp_path):
    prefixes = write_pairs(tmp_path)
    build(gpt_config(tmp_path / "cache", blend=(prefixes, [3, 2, 1]), split="8,1,1"))
    found = run_ranks(tmp_path / "cache", prefixes, absent=[1])
    assert found[1] == [None, None, None]
    assert found[0][0] is not None


def test_an_index_that_is_missing_is_an_error_on_every_rank_that_says_what_to_do(tmp_path):
    prefixes = write_pairs(tmp_path)
    for found in run_ranks(tmp_path / "cache", prefixes):
        assert found.startswith("CacheError")
        assert "not yet distributed: build this cache in one process first" in found
    assert not (tmp_path / "cache").exists()


def test_one_rank_alone_builds(tmp_path):
    prefixes = write_pairs(tmp_path)
    (found,) = run_ranks(tmp_path / "cache", prefixes, size=1)
    assert len(found) == 3
    assert list((tmp_path / "cache").glob("*.npy"))
