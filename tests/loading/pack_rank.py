"""One rank that opens a blend of packs and takes its first batch. Writes as JSON what it took."""

import json
import sys
import time

import trackbed


def main():
    blend, rank, num_ranks, batch_size = sys.argv[1], *map(int, sys.argv[2:])
    open_blend, loader_of = trackbed.open_blend, trackbed.BatchLoader  # imports them, with torch
    started = time.perf_counter()
    train = open_blend(blend).train
    opened = time.perf_counter() - started
    loader = loader_of(
        train, batch_size=batch_size, layout="thd", rank=rank, num_ranks=num_ranks, ahead=1, num_threads=1
    )
    batch = next(iter(loader))
    seconds = time.perf_counter() - started
    found = {"opened": opened, "seconds": seconds, "trained": int(batch["num_trained_tokens"])}
    print(json.dumps(found | {"places": int(batch["cu_seqlens"][-1]), "division": loader.division()}), flush=True)


if __name__ == "__main__":
    main()
