"""A process that builds a blend of many datasets and reads all of them: FOLDER NUM_DATASETS ORDER STEP.

Every dataset is read by `gather`, and every STEP-th position by index as well.

It may have 1,024 files open. Prints JSON: the most maps at a time, and the memory that it took.
"""

import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.files.blends import build, gpt_config, write_pair

DOCUMENTS = 1200
LENGTH = 4
LINKS = 30_000
"""Names of one file: file systems allow some ten thousand."""


def write_pairs(folder, count):
    """Pairs that are names of a few files, each of several pages."""
    prefixes = []
    for number in range(count):
        source = folder / f"source{number // LINKS}"
        if number % LINKS == 0:
            write_pair(source, [LENGTH] * DOCUMENTS, seed=number)
        for ending in ("bin", "idx"):
            os.link(f"{source}.{ending}", folder / f"pair{number}.{ending}")
        prefixes.append(str(folder / f"pair{number}"))
    return prefixes


def num_maps():
    return len(Path("/proc/self/maps").read_bytes().splitlines())


def memory_bytes():
    """Anonymous memory and mapped files of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def read_all(train, count, step):
    """Read every dataset by index and by `gather`, and compare."""
    found = hashlib.sha256()
    datasets = set()
    positions = np.random.default_rng(0).permutation(len(train))
    most = 0
    for first in range(0, len(positions), 512):
        some = positions[first : first + 512]
        batch = train.gather(some)
        datasets.update(batch["dataset_id"].tolist())
        for at in range(0, len(some), step):
            one = train[int(some[at])]
            if one["tokens"].tolist() != batch["tokens"][at].tolist():
                raise SystemExit(f"position {some[at]}: {one['tokens']} by index, {batch['tokens'][at]} by gather")
        found.update(batch["tokens"].numpy().tobytes())
        most = max(most, num_maps())
    if len(datasets) != count:
        raise SystemExit(f"{len(datasets)} of {count} datasets were drawn")
    return found.hexdigest(), most


if __name__ == "__main__":
    folder, count, order, step = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    prefixes = [str(folder / f"pair{number}") for number in range(count)]
    config = gpt_config(
        folder / "cache", blend=(prefixes, [1.0] * count), split="1", sequence_length=LENGTH, order=order
    )
    config.num_dataset_builder_threads = 2
    digests, seconds = [], []
    at_first = memory_bytes()  # of the libraries, which differs by a hundred MB
    for _ in range(2):  # the second start is from the cache
        started = time.monotonic()
        train = build(config, (2 * count, None, None))[0]
        seconds.append(round(time.monotonic() - started, 2))
        digest, most = read_all(train, count, step)
        digests.append(digest)
        memory = memory_bytes()
        del train
    if digests[0] != digests[1]:
        raise SystemExit("the second start gave other samples")
    print(json.dumps({"maps": most, "memory": memory - at_first, "seconds": seconds, "digest": digests[0]}))
