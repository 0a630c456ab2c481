"""Under more than one rank, in real processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, tokens_of, write_pairs
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.comm.threads import run_ranks as run_ranks_in_threads
from trackbed.datasets import GPTDataset
from trackbed.errors import CollectiveError

pytestmark = pytest.mark.dist

RANK = """
import json, sys
import torch.distributed
sys.path.insert(0, sys.argv[1])
from tests.support.files.blends import BlendedMegatronDatasetBuilder, GPTDataset, gpt_config, tokens_of
from pathlib import Path

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
cache, prefixes, absent = Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
try:
    threads, weights = int(sys.argv[5]), json.loads(sys.argv[6])
    config = gpt_config(
        cache, blend=(prefixes, weights), split="8,1,1", num_dataset_builder_threads=threads
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [50, 5, 5], lambda: rank not in absent, config).build()
    found = [None if dataset is None else tokens_of(dataset, range(5)) for dataset in built]
except Exception as error:
    found = f"{type(error).__name__}: {error}"
Path(f"{cache}.rank{rank}").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""


def run_ranks(cache, prefixes, *, absent=(), size=2, threads=1, weights=(3, 2, 1)):
    """What each of `size` processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [str(cache), json.dumps(prefixes), json.dumps(list(absent)), str(threads), json.dumps(weights)]
    arguments = [str(ROOT), *given]
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


def files_in(folder):
    """Bytes of each file of a cache, by name."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "notes"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("absent", [(), (0,), pytest.param((1,), marks=pytest.mark.slow)])
def test_ranks_that_want_datasets_build_what_is_missing(tmp_path, absent):
    prefixes = write_pairs(tmp_path)
    alone = build(gpt_config(tmp_path / "alone", blend=(prefixes, [3, 2, 1]), split="8,1,1"))
    wanted = [tokens_of(dataset, range(5)) for dataset in alone]
    found = run_ranks(tmp_path / "cache", prefixes, absent=absent)
    assert found == [[None] * 3 if rank in absent else wanted for rank in range(2)]
    assert files_in(tmp_path / "cache") == files_in(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_any_number_of_ranks_and_threads_builds_the_same_files(tmp_path, size, threads):
    prefixes = write_pairs(tmp_path, 6)
    weights = [3, 2, 1, 1, 1, 1]
    alone = build(gpt_config(tmp_path / "alone", blend=(prefixes, weights), split="8,1,1"))
    wanted = [tokens_of(dataset, range(5)) for dataset in alone]
    found = run_ranks(tmp_path / "cache", prefixes, weights=weights, size=size, threads=threads)
    assert found == [wanted] * size
    assert files_in(tmp_path / "cache") == files_in(tmp_path / "alone")


def test_ranks_that_all_want_nothing_build_nothing(tmp_path):
    prefixes = write_pairs(tmp_path)
    assert run_ranks(tmp_path / "cache", prefixes, absent=[0, 1]) == [[None] * 3] * 2
    assert not (tmp_path / "cache").exists()


def test_one_rank_alone_builds(tmp_path):
    prefixes = write_pairs(tmp_path)
    (found,) = run_ranks(tmp_path / "cache", prefixes, size=1)
    assert len(found) == 3
    assert list((tmp_path / "cache").glob("*.npy"))


def test_one_rank_alone_is_asked_what_it_wants_and_raises_its_own_errors(tmp_path):
    prefixes = write_pairs(tmp_path)
    assert run_ranks(tmp_path / "cache", prefixes, size=1, absent=[0]) == [[None] * 3]
    (found,) = run_ranks(tmp_path / "cache", [*prefixes[:2], f"{tmp_path}/absent"], size=1)
    assert found.startswith(f"ArgumentError: {tmp_path}/absent: a .bin and an .idx file must exist")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("absent", [(), (0,), (1, 2)])
def test_where_each_host_has_a_cache_of_its_own_its_ranks_build_all_of_it(tmp_path, absent):
    prefixes = write_pairs(tmp_path)
    alone = build(gpt_config(tmp_path / "alone", blend=(prefixes, [3, 2, 1]), split="8,1,1"))
    wanted = [tokens_of(dataset, range(5)) for dataset in alone]

    def read(group):
        config = gpt_config(tmp_path / f"node{group.rank % 2}", blend=(prefixes, [3, 2, 1]), split="8,1,1")
        wants = group.rank not in absent
        built = BlendedMegatronDatasetBuilder(GPTDataset, [50, 5, 5], lambda: wants, config, group=group).build()
        return [None if dataset is None else tokens_of(dataset, range(5)) for dataset in built]

    def check():
        found = run_ranks_in_threads(4, read)
        assert found == [[None] * 3 if rank in absent else wanted for rank in range(4)]
        for node in ("node0", "node1"):
            assert files_in(tmp_path / node) == files_in(tmp_path / "alone")

    check()
    check()
    cut = min((tmp_path / "node1").glob("*-sample_index.npy"))
    os.truncate(cut, 100)
    check()


def test_hosts_with_caches_of_their_own_know_how_long_whole_datasets_are(tmp_path):
    prefixes = write_pairs(tmp_path)
    alone = build(gpt_config(tmp_path / "alone", blend=(prefixes, None), split="8,1,1"), [None] * 3)

    def read(group):
        config = gpt_config(tmp_path / f"node{group.rank % 2}", blend=(prefixes, None), split="8,1,1")
        return BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config, group=group).build()

    for _ in range(2):
        for built in run_ranks_in_threads(3, read):
            assert [len(dataset) for dataset in built] == [len(dataset) for dataset in alone]
            assert tokens_of(built[0], range(len(built[0]))) == tokens_of(alone[0], range(len(alone[0])))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            lambda rank: {"blend_split": True, "add_extra_token_to_sequence": bool(rank)},
            "pair0, split train: add_extra_token_to_sequence is false on rank 0 and true on rank 1",
        ),
        (
            lambda rank: {"blend_split": True, "order": "balanced", "weights": [3, 2, 1 + rank / 10**7]},
            r"the blend of split train: weights\[0\] is 0.5\d* on rank 0 and 0.49999999\d* on rank 1",
        ),
        (
            lambda rank: {"multiple_validation_sets": bool(rank)},
            "multiple_validation_sets is false on rank 0 and true on rank 1",
        ),
    ],
    ids=["an option that no name tells of", "weights of the balanced order", "whether there is more to come"],
)
def test_ranks_that_want_other_things_under_the_same_names_are_told_at_once(tmp_path, options, words):
    prefixes = write_pairs(tmp_path)

    def build_on(group):
        chosen = options(group.rank)
        weights = chosen.pop("weights", [3, 2, 1])
        if chosen.pop("blend_split", False):
            config, sizes = (
                gpt_config(tmp_path / "cache", blend=(prefixes, weights), split="8,1,1", **chosen),
                [50, 5, 5],
            )
        else:
            blends = [None, (prefixes, None), None]
            config, sizes = gpt_config(tmp_path / "cache", blend_per_split=blends, **chosen), [None] * 3
        with pytest.raises(CollectiveError, match=words):
            BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config, group=group).build()

    run_ranks_in_threads(2, build_on)
