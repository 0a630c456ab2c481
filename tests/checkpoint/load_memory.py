"""Loads a checkpoint into tensors that exist, and prints the memory that this took: `load_memory.py FOLDER`."""

import json
import sys
import threading
from pathlib import Path

import torch

from trackbed.checkpoint import ShardedTensor, load, open_checkpoint


def anonymous_bytes():
    """Anonymous memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def main(folder):
    torch.set_num_threads(1)
    stored = open_checkpoint(folder)
    # Ones, so that the memory of the targets is taken before the load.
    request = {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(stored[key].shape, dtype=torch.float32)) for key in stored
    }
    before, seen, has_ended = anonymous_bytes(), [0], threading.Event()

    def watch():
        while not has_ended.wait(0.001):
            seen[0] = max(seen[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    loaded = load(request, folder)
    has_ended.set()
    thread.join()
    sums = {key: float(loaded[key].sum(dtype=torch.float64)) for key in stored}
    print(json.dumps({"more": seen[0] - before, "sums": sums}))


if __name__ == "__main__":
    main(sys.argv[1])
