"""The first batch of packs from files that are not in memory: how long it takes, and what a rank reads for it.

What was read is counted in pages of memory, as the system reads no less: `mincore` says which pages of a file it holds
after the rank has ended. That includes what it has read ahead. Opening a blend compares the beginnings of up to 32
files with the tokenizer, once and whatever is read later: those 32 KiB are not counted.
"""

import ctypes
import json
import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from tests.datasets.test_packed import packed
from tests.support import ROOT
from tests.support.tiers import slow_but
from trackbed import open_blend
from trackbed.loading import provenance
from trackbed.loading.loader import samples_of
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns, TrainedTokens

RANKS, BATCH, LENGTH = 512, 2, 4096
PAGE = mmap.PAGESIZE
COMPARED, COMPARED_BYTES = 32, 32 << 10
PAIRS = {40_000: 4, 100_000: 100}
"""Pairs of so many documents each."""
BLEND = f"""version = 1
sequence_length = {LENGTH}
order = "packed"
split = "1"
tokenizer = "null:50000"
size = {{train = {RANKS * BATCH}}}
"""


def write_conversations(folder, num_pairs, num_documents):
    """Pairs of conversations of 120 tokens on average, the last half of each of which is trained."""
    rng = np.random.default_rng(1)
    content = rng.integers(0, 50_000, 1 << 20, dtype=np.uint16)
    blend = BLEND
    for number in range(num_pairs):
        lengths = np.clip(rng.lognormal(np.log(80), 0.9, num_documents), 2, 20_000).astype(np.int32)
        lengths[:: num_documents // 5] = 30_000  # cut into packs of several pages each
        builder = IndexedDatasetBuilder(f"{folder / f'{number:03d}'}.bin", np.uint16)
        builder.trained = TrainedColumns()
        builder.add_documents(np.resize(content, int(lengths.sum())), lengths)
        runs = np.stack([lengths // 2, lengths - lengths // 2], axis=1).astype(np.uint32)
        builder.trained.add(np.ones(num_documents, dtype=np.int64), runs, lengths=lengths, where="mask")
        builder.finalize(f"{folder / f'{number:03d}'}.idx")
        blend += f'[[dataset]]\npath = "{number:03d}"\nweight = 1\n'
    (folder / "blend.toml").write_text(blend)
    return folder


def drop_from_memory(folder):
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pages_in_memory(path):
    """The numbers of the pages of a file that the system has in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        content = np.frombuffer(mapped, dtype=np.uint8)
        found = np.zeros(-(-len(content) // PAGE), dtype=np.uint8)
        address, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(content))
        assert ctypes.CDLL(None).mincore(address, size, found.ctypes.data_as(ctypes.c_char_p)) == 0
        del content
    return set(np.flatnonzero(found & 1).tolist())


def pages_of(start, stop):
    """The pages of a range of bytes, which is not empty."""
    return set(range(start // PAGE, (stop - 1) // PAGE + 1))


def own_pages(train, positions):
    """The pages of `.bin` and `.mask` files that have tokens and runs of some samples, by the names of the files."""
    found = {}
    for position in positions:
        for prefix, document, start, stop in map(vars_of, provenance(train, position).origins):
            first = int(IndexedDataset(prefix).index.sequence_pointers[document])
            found.setdefault(f"{prefix}.bin", set()).update(pages_of(first + 2 * start, first + 2 * stop))
            firsts = TrainedTokens.open(prefix).firsts
            runs = 32 + 8 * len(firsts) + 8 * np.array(firsts[document : document + 2], dtype=np.int64)
            mask = found.setdefault(f"{prefix}.mask", {0})  # whose header says how many documents there are
            mask |= pages_of(32 + 8 * document, 48 + 8 * document) | pages_of(*runs.tolist())
    return found


def vars_of(origin):
    return origin.prefix, origin.document, origin.start, origin.stop


@pytest.fixture(scope="module", params=slow_but([40_000], PAIRS))
def folder(tmp_path_factory, request):
    made = write_conversations(tmp_path_factory.mktemp("start"), PAIRS[request.param], request.param)
    drop_from_memory(made)
    if any(pages_in_memory(path) for path in made.iterdir()):
        pytest.skip("this file system keeps its files in memory")
    yield made
    for path in made.iterdir():
        path.unlink()


@pytest.mark.parametrize("rank", [0, 200, 511])
def test_a_rank_reads_the_pages_of_its_own_tokens_alone(folder, rank):
    drop_from_memory(folder)
    command = [sys.executable, "-m", "tests.loading.pack_rank", str(folder / "blend.toml"), str(rank), str(RANKS)]
    done = subprocess.run([*command, str(BATCH)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    in_memory = {str(path): pages_in_memory(path) for path in sorted(folder.iterdir())}
    own = own_pages(open_blend(folder / "blend.toml").train, samples_of(0, RANKS * BATCH, rank, **said["division"]))
    for suffix in (".bin", ".mask"):
        wanted = {name: pages for name, pages in own.items() if name.endswith(suffix)}
        found = {name: pages for name, pages in in_memory.items() if name.endswith(suffix) and pages}
        for name, pages in wanted.items():
            assert pages <= found[name], name
        compared = set(range(COMPARED_BYTES // PAGE)) if suffix == ".bin" else set()
        further = [pages - wanted.get(name, set()) for name, pages in found.items()]
        assert sum(not pages.isdisjoint(compared) for pages in further) <= COMPARED
        num_own, num_further = sum(map(len, wanted.values())), sum(len(pages - compared) for pages in further)
        assert num_further <= 0.1 * num_own, (suffix, num_own, num_further)
    assert said["seconds"] < 2


def test_long_documents_are_read_in_few_steps(tmp_path):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50_000, 2_000_000, dtype=np.uint16)
    builder = IndexedDatasetBuilder(str(tmp_path / "long.bin"), np.uint16)
    builder.add_documents(tokens, np.full(20, 100_000, dtype=np.int32))
    builder.finalize(str(tmp_path / "long.idx"))
    data = packed(None, [str(tmp_path / "long")], sequence_length=1 << 17)
    drop_from_memory(tmp_path)
    if pages_in_memory(tmp_path / "long.bin"):
        pytest.skip("this file system keeps its files in memory")
    waits = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    batch = data.gather([0, 1], num_threads=1)
    waits = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - waits
    pages = set()
    for row, position in enumerate([0, 1]):
        (piece,) = data.pieces(position)
        start = 100_000 * piece.document
        wanted = tokens[start : start + 100_000].astype(np.int64)
        assert np.array_equal(batch["tokens"][row, :99_999].numpy(), wanted[:-1])
        pages |= pages_of(2 * start, 2 * start + 200_000)
    assert pages_in_memory(tmp_path / "long.bin") == pages
    assert waits < len(pages) / 2  # pages that were not yet there when they were copied
