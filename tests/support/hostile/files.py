"""Starts over damaged files: each in a process of its own, with little address space and little time.

One process that has imported everything damages a file, forks, and puts all files back as they were, inodes and times
included, so that what an earlier start remembers holds for the next one. The child opens, verifies, builds and reads
everything, and says for each sample whether it is right.
"""

import contextlib
import errno
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, write_pairs
from tests.support.hostile.mutations import (
    change_bytes,
    change_index,
    change_json,
    change_npy,
    change_text,
    odd_kinds,
    replace_by,
)
from trackbed.cache import await_flush, find_problems, plan_removal, remove, take_inventory
from trackbed.datasets import GPTDataset
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.tokens import IndexedDataset, seal, verify, verify_content

ADDRESS_BYTES = 3 << 30
"""Besides what the libraries take, which is 7 GiB with torch for CUDA."""
FILE_BYTES = 64 << 20
SECONDS = 20.0
ORDERS = ("megatron", "balanced", "instant")
SIZES = (60, 6, 6)
SENTENCE = 3_000  # characters at most
PAIRS = 3
DTYPES = ["", "u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]  # by their code in an `.idx`


def config_of(folder, order):
    prefixes = [str(folder / f"pair{number}") for number in range(PAIRS)]
    return gpt_config(
        folder / "cache",
        blend=(prefixes, [3, 2, 1]),
        split="8,1,1",
        order=order,
        create_cu_seqlens=True,
        create_attention_mask=False,
    )


def plain(sample):
    return {name: np.asarray(value).tolist() for name, value in sample.items()}


def sentence(error, folder, *documented):
    """The words of an error that is one sentence and names a file or a folder; else why it is not.

    Args:
        error: what was raised.
        folder: what its words must name.
        *documented: other classes than Trackbed's that are in the contract of what was called.
    """
    words = str(error)
    if not isinstance(error, (TrackbedError, ArgumentError, *documented)):
        raise AssertionError(f"{type(error).__name__}: {words}") from error
    if "\n" in words or len(words) > SENTENCE or str(folder) not in words:
        raise AssertionError(f"no sentence that names a file: {type(error).__name__}: {words[:SENTENCE]}") from error
    return words


class Refused(str):
    """A sample that was refused, in words."""

    __slots__ = ()


def attempt(function, folder, *documented):
    """What `function` returns, or the words of its error."""
    try:
        return function()
    except Exception as error:
        return Refused(sentence(error, folder, *documented))


def differing(sample, other):
    return {name: (value, other.get(name)) for name, value in sample.items() if other.get(name) != value}


def samples_of(dataset, folder):
    """Every sample of a dataset by index, which must be what `gather` gives."""
    found = []
    for position in range(len(dataset)):
        sample = attempt(lambda position=position: plain(dataset[position]), folder)
        batch = attempt(lambda position=position: plain(dataset.gather([position]).samples()[0]), folder)
        assert isinstance(sample, Refused) == isinstance(batch, Refused), (position, sample, batch)
        assert isinstance(sample, Refused) or sample == batch, differing(sample, batch)
        found.append(sample)
    whole = attempt(lambda: [plain(one) for one in dataset.gather(range(len(dataset))).samples()], folder)
    assert isinstance(whole, Refused) == any(isinstance(one, Refused) for one in found)
    assert isinstance(whole, Refused) or whole == found
    return found


def start(folder, order):
    """All samples of all splits, or the words of the error that building raised."""
    built = attempt(lambda: build(config_of(folder, order), SIZES, cls=GPTDataset), folder)
    if isinstance(built, Refused):
        return built
    return [samples_of(dataset, folder) for dataset in built]


class Tree:
    """A folder of files that is put back as it was, with the same inodes and times."""

    def __init__(self, folder):
        self.folder, self.kept = folder, folder.with_name(f"{folder.name}-kept")
        shutil.copytree(folder, self.kept, copy_function=os.link)
        self.content = {
            path: (path.read_bytes(), path.stat().st_mtime_ns) for path in self.kept.rglob("*") if path.is_file()
        }

    def restore(self):
        shutil.rmtree(self.folder)
        for path, (raw, modified_ns) in self.content.items():
            if path.stat().st_mtime_ns != modified_ns or path.read_bytes() != raw:
                path.write_bytes(raw)
                os.utime(path, ns=(modified_ns, modified_ns))
        shutil.copytree(self.kept, self.folder, copy_function=os.link)


def read_small(path):
    """The bytes of a regular file that is no sparse one of terabytes."""
    if not path.is_file() or path.stat().st_size > FILE_BYTES:
        raise OSError(errno.EINVAL, "no small file", str(path))
    return path.read_bytes()


def read_pair(prefix):
    """An `.idx` and a `.bin`, read without trusting or using any code under test; None if sizes do not fit."""
    try:
        raw, data = read_small(Path(f"{prefix}.idx")), read_small(Path(f"{prefix}.bin"))
        magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", raw)
        dtype = np.dtype(DTYPES[code])
    except (OSError, struct.error, IndexError, MemoryError, TypeError):
        return None
    size = 34 + 12 * sequences + 8 * borders
    if (magic, version) != (b"MMIDIDX\0\0", 1) or not code or not borders or len(raw) not in (size, size + sequences):
        return None
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    return dtype, lengths, pointers, np.frombuffer(raw, "<i8", borders, 34 + 12 * sequences), data


def is_legal(pair):
    """True if everything that docs/formats/indexed.md says of a pair holds."""
    if pair is None:
        return False
    dtype, lengths, pointers, borders, data = pair
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    return bool(
        (lengths >= 0).all()
        and (pointers == ends - lengths.astype(np.int64) * dtype.itemsize).all()
        and (ends[-1] if len(ends) else 0) == len(data)
        and borders[0] == 0
        and (np.diff(borders) >= 0).all()
        and borders[-1] == len(lengths)
    )


def make_whole(pair, prefix):
    """Writes the same sequences as a pair that is legal. False if the index does not say what they are.

    A sequence that lies outside the `.bin` gets tokens that are nowhere else.
    """
    if pair is None or (pair[1] < 0).any():
        return False
    dtype, lengths, pointers, _, data = pair
    if int(lengths.sum(dtype=np.int64)) > 1 << 20:
        return False
    rng, parts = np.random.default_rng(99), []
    for start, length in zip(pointers.tolist(), lengths.tolist(), strict=True):
        stop = start + length * dtype.itemsize
        inside = data[max(start, 0) : max(stop, 0)]
        before = rng.bytes(min(max(-start, 0), stop - start))
        parts.append(before + inside + rng.bytes(length * dtype.itemsize - len(before) - len(inside)))
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    Path(f"{prefix}.bin").write_bytes(b"".join(parts))
    code = DTYPES.index(dtype.str.lstrip("|"))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), 2)
    starts = np.array([0, *ends[:-1]] if len(ends) else [], np.int64)
    Path(f"{prefix}.idx").write_bytes(
        head + lengths.tobytes() + starts.tobytes() + np.array([0, len(lengths)], np.int64).tobytes()
    )
    return True


def is_window(sample, folder):
    """True if a sample's tokens lie one after the other in one of the pairs, as the order "instant" reads them."""
    for number in range(PAIRS):
        with contextlib.suppress(OSError):
            raw = read_small(Path(f"{folder}/pair{number}.bin"))
            dtype = (read_pair(f"{folder}/pair{number}") or [np.dtype("<u2")])[0]
            tokens = np.array([*sample["tokens"], sample["labels"][-1]])
            if dtype.kind in "iu" and tokens.astype(dtype).tobytes() in raw:
                return True
    return False


def compare(found, wanted):
    """How many samples are right, refused and wrong."""
    if isinstance(found, Refused):
        return Counter(refused=1)
    counts = Counter()
    for split, split_wanted in zip(
        found, wanted if not isinstance(wanted, Refused) else [[]] * len(found), strict=True
    ):
        assert isinstance(wanted, Refused) or len(split) == len(split_wanted), (len(split), len(split_wanted))
        for position, sample in enumerate(split):
            is_right = position < len(split_wanted) and sample == split_wanted[position]
            counts["refused" if isinstance(sample, Refused) else "right" if is_right else "wrong"] += 1
    return counts


def first_wrong(found, wanted):
    """Where the first wrong sample is, and how it differs."""
    for split, wanted_split in zip(found, wanted, strict=True):
        for position, (one, other) in enumerate(zip(split, wanted_split, strict=True)):
            if not isinstance(one, Refused) and one != other:
                return position, differing(one, other) if isinstance(other, dict) else other
    return None


def read_documents(prefix, folder, **options):
    """Opens a pair and reads all of it; gives what each sequence holds."""
    dataset = IndexedDataset(str(prefix), **options)
    found = []
    for number in range(len(dataset)):
        one = attempt(
            lambda number=number: np.asarray(dataset[number][0] if "multimodal" in options else dataset[number]), folder
        )
        attempt(lambda number=number: dataset.get(number, 1, 2), folder)
        attempt(lambda number=number: dataset[number : number + 2], folder)
        found.append(one)
    borders = dataset.document_indices.tolist()
    for first, stop in pairwise(borders[:51]):
        attempt(lambda first=first, stop=stop: dataset[first:stop], folder)
    return found


def try_pair(folder, number, undamaged):
    """What came of a damaged pair."""
    prefix = folder / f"pair{number}"
    pair = read_pair(prefix)
    is_whole, outcome = is_legal(pair), Counter()
    for options in ({}, {"mmap": False}, {"multimodal": True}, {"fast_cache_load": True}, {"open_when_read": True}):
        found = attempt(lambda options=options: read_documents(prefix, folder, **options), folder)
        if isinstance(found, Refused):
            assert not is_whole or "multimodal" in options, found
            outcome["pairs refused"] += 1
            continue
        if pair is None:
            assert all(isinstance(one, Refused) or not one.any() for one in found)  # holes are zeros
            continue
        dtype, lengths, pointers, _, data = pair
        for one, length, first in zip(found, lengths.tolist(), pointers.tolist(), strict=True):
            if isinstance(one, Refused):
                assert not is_whole, one
            else:
                assert one.tobytes() == data[first : first + length * dtype.itemsize]
                assert first >= 0
        outcome["pairs opened"] += 1
    assert isinstance(attempt(lambda: verify(str(prefix)), folder, OSError), Refused) is not is_whole
    attempt(lambda: verify_content(str(prefix)), folder, OSError)
    other = folder.with_name(f"{folder.name}-whole")
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    for one in range(PAIRS):
        for suffix in (".idx", ".bin"):
            if one != number:
                shutil.copy(folder / f"pair{one}{suffix}", other)
    can_compare = make_whole(pair, other / f"pair{number}")
    for order in ORDERS:
        wanted = attempt(lambda order=order: start(other, order), other) if can_compare else Refused()
        if pair is None:
            wanted = undamaged[order]  # of a pair that can be opened, but not read
        found = start(folder, order)
        if not is_whole and order == "instant" and not isinstance(found, Refused):
            for sample in (sample for split in found for sample in split):
                is_right = isinstance(sample, Refused) or is_window(sample, folder)
                assert is_right or is_short(sample), (order, sample)
                outcome["refused" if isinstance(sample, Refused) else "right"] += 1
            continue
        counts = compare(found, wanted)
        assert not counts["wrong"], (
            order,
            counts,
            wanted if isinstance(wanted, Refused) else first_wrong(found, wanted),
        )
        assert not (is_whole and counts["refused"] and not isinstance(wanted, Refused)), (order, counts, found)
        outcome += counts
    return outcome


def is_short(sample):
    """True for a sample of a split that has fewer tokens than one sample: they are repeated."""
    return len(sample["cu_seqlens"]) > 0 and len(set(sample["tokens"])) < len(sample["tokens"])


def damage_pair(draw, folder):
    """Damages one file of a pair. Returns what was done."""
    number = draw.randrange(PAIRS)
    suffix = draw.choice([".idx", ".idx", ".idx", ".idx", ".bin", ".bin", ".trackbed.json"])
    path = folder / f"pair{number}{suffix}"
    if draw.random() < 0.08:
        kind = draw.choice([*odd_kinds()])
        replace_by(path, kind)
        return {"path": str(path), "number": number, "what": kind}
    change = {".idx": change_index, ".bin": change_bytes, ".trackbed.json": change_json}[suffix]
    raw = change(draw, path.read_bytes())
    if draw.random() < 0.5:
        path.write_bytes(raw)
    else:
        path.unlink()
        path.write_bytes(raw)
    if draw.random() < 0.5:
        shutil.rmtree(folder / "cache")
    return {"path": str(path), "number": number, "what": change.__name__}


def damage_cache(draw, folder):
    """Damages one file of a cache. Returns what was done, and how the cache is to be opened."""
    cache = folder / "cache"
    state = draw.choice(["this boot", "this boot", "this boot", "other boot", "other boot, unmarked", "no manifest"])
    own = cache / ".trackbed"
    if state == "other boot, unmarked":
        shutil.rmtree(own / "notes")
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    kinds = {
        "array": [path for path in files if path.suffix == ".npy"],
        "description": [path for path in files if path.name.endswith("description.txt")],
        "manifest": [path for path in files if path.suffix == ".json" and path.parent.name != "starts"],
        "memo": [path for path in files if path.parent.name == "starts"],
        "note": [path for path in files if path.parent.name in ("notes", "uses")],
        "folder": [own, *(path for path in own.iterdir() if path.is_dir()), own / "partial"],
    }
    names = ["array"] * 5 + ["manifest"] * 5 + ["memo"] * 2 + ["note"] * 2 + ["description", "folder"]
    kind = draw.choice([name for name in names if kinds[name]])
    if state == "no manifest":
        kind = draw.choice(["array", "array", "description"])
    path = draw.choice(kinds[kind])
    if state == "no manifest":
        if path.is_relative_to(own):
            path = draw.choice([one for one in kinds[kind] if not one.is_relative_to(own)])
        shutil.rmtree(own)
    done = {"path": str(path), "kind": kind, "state": state, "keeps_size": False, "keeps_time": False}
    if kind == "folder" or draw.random() < 0.12:
        what = draw.choice([*odd_kinds()])
        if kind == "folder" and what == "empty file":
            what = "loop"
        replace_by(path, what)
        return {**done, "what": what}
    raw, status = path.read_bytes(), path.stat()
    changed = {"array": change_npy, "manifest": change_json, "memo": change_json}.get(kind, change_text)(draw, raw)
    if draw.random() < 0.2:
        path.unlink()
    path.write_bytes(changed)
    keeps_time = draw.random() < 0.5
    if keeps_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return {**done, "keeps_size": len(changed) == len(raw), "keeps_time": keeps_time, "what": "bytes"}


def may_be_served(done, problems):
    """True for numbers that were overwritten where nothing is read to find that out."""
    if done["kind"] != "array" or not done["keeps_size"]:
        return False
    if done["state"] == "no manifest":
        return True
    is_trusted = done["state"] == "this boot" or (done["state"] == "other boot" and done["keeps_time"])
    return is_trusted and any(done["path"] in problem for problem in problems)


def try_cache(folder, done, wanted):
    """What came of a damaged cache."""
    cache, outcome = folder / "cache", Counter()
    problems = attempt(lambda: list(find_problems(take_inventory(str(cache)))), folder)
    problems = [problems] if isinstance(problems, Refused) else problems
    assert all("\n" not in problem and len(problem) < SENTENCE and str(cache) in problem for problem in problems), (
        problems
    )
    outcome["verify finds problems" if problems else "verify finds none"] += 1
    if done["state"].startswith("other boot"):
        os.environ["TRACKBED_BOOT_ID"] = "after"
    for order in ORDERS:
        found = start(folder, order)
        counts = compare(found, wanted[order])
        assert not counts["wrong"] or may_be_served(done, problems), (order, counts)
        outcome += counts
    if done["kind"] not in ("folder",):
        again = start(folder, "megatron")
        assert not compare(again, wanted["megatron"])["wrong"] or may_be_served(done, problems)

    def collect():
        inventory = take_inventory(str(cache))
        remove(plan_removal(inventory, now=time.time() + 1e6, keep_bytes=inventory.size_bytes // 2))

    attempt(collect, folder, OSError)
    return outcome


def prepare(folder):
    """Pairs, their seals and a cache of all orders; what undamaged starts give."""
    os.environ["TRACKBED_BOOT_ID"] = "before"
    folder.mkdir()
    for prefix in write_pairs(folder):
        seal(prefix)
    found = {order: start(folder, order) for order in ORDERS}
    await_flush()
    assert not any(isinstance(one, Refused) for one in found.values())
    return found


def run_child(function, seconds, errors):
    """The outcome of `function` in a child with little memory, or why there is none."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
            faulthandler.dump_traceback_later(seconds * 0.9)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES + pages * resource.getpagesize(),) * 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
            result = [dict(function()), ""]
        except BaseException as error:
            import traceback

            result = [{}, "".join(traceback.format_exception(error))[-6000:]]
        with os.fdopen(sender, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(sender)
    stop = time.monotonic() + seconds
    is_late = False
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > stop:
            is_late = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(receiver) as pipe:
        raw = pipe.read()
    if is_late or code != 0 or not raw:
        return {}, f"{'hangs' if is_late else f'ends with {code}'}\n{Path(errors).read_text(errors='replace')[-3000:]}"
    return json.loads(raw)


def main(kind, root, first, count):
    """Tries mutants and prints, for each, what was done, the counts of outcomes, and what was wrong."""
    root = Path(root)
    folder = root / "data"
    wanted = prepare(folder)
    tree = Tree(folder)
    for seed in range(first, first + count):
        draw = random.Random(seed)
        if kind == "pairs":
            done = damage_pair(draw, folder)
            run = partial(try_pair, folder, done["number"], wanted)
        else:
            done = damage_cache(draw, folder)
            run = partial(try_cache, folder, done, wanted)
        outcome, wrong = run_child(run, SECONDS, root / "stderr")
        print(json.dumps({"seed": seed, "done": done, "outcome": outcome, "wrong": wrong}), flush=True)
        tree.restore()


def run_mutants(kind, root, seeds):
    """Tries the mutants of some seeds in a process of its own. Returns what `main` printed."""
    command = [sys.executable, "-m", __name__, kind, str(root), str(seeds.start), str(len(seeds))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
