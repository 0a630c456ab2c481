"""One rank that gets the batch of another one. Writes what came as JSON."""

import json
import os

import torch
import torch.distributed as dist

from trackbed.errors import TrackbedError
from trackbed.loading import broadcast_batch


def main():
    dist.init_process_group("gloo")
    expected = {"tokens": torch.arange(12).view(3, 4), "loss_mask": torch.ones(3, 4), "empty": torch.zeros((0, 4))}
    group = dist.new_group([2, 1])  # whose first rank is 1
    is_same = True
    for ranks, source in ((None, 0), (group, 1)):
        if ranks is None or dist.get_rank() > 0:
            found = broadcast_batch(expected if dist.get_rank() == source else None, ranks)
            is_same &= list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)
    try:
        broadcast_batch({"tokens": [1]} if dist.get_rank() == 0 else None)
    except TrackbedError as error:
        print(json.dumps({"same": is_same, "error": type(error).__name__}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
