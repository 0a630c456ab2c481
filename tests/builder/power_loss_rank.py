"""A process that builds indices on a disk that is about to lose its power: CACHE DATA {flush|no-flush|read}.

With `read` it prints a digest of many samples; else it lives on after the build, as a training job does, until killed.
"""

import errno
import hashlib
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trackbed.cache.notes
from tests.support.files.blends import build, gpt_config, tokens_of

LARGE = (90_000, 100, 100)


def large_config(cache, folder):
    """Arrays of some MiB, which are filled in their files, and small ones."""
    prefixes = [str(folder / "large"), str(folder / "small")]
    return gpt_config(cache, blend=(prefixes, [3.0, 1.0]), split="98,1,1")


def digest(datasets):
    """SHA-256 of the tokens of many samples all over the datasets."""
    found = hashlib.sha256()
    for one in datasets:
        found.update(np.array(tokens_of(one, range(0, len(one), 1 + len(one) // 2000))).tobytes())
    return found.hexdigest()


def fail(_folder):
    """What stands for a flush that never comes."""
    raise OSError(errno.EIO, "no flush")


if __name__ == "__main__":
    cache, data, action = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if action == "no-flush":
        trackbed.files.writeback.flush_file_system = fail
    print("begins", flush=True)
    datasets = build(large_config(cache, data), LARGE)
    if action == "read":
        print(digest(datasets))
    else:
        time.sleep(60)
