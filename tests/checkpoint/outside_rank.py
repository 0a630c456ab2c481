"""One gloo rank of calls with a group of rank 0 alone: `outside_rank.py FOLDER`. Prints what each call raises."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trackbed
from trackbed.errors import ArgumentError


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    group = dist.new_group([0])
    module = torch.nn.Linear(2, 2)
    calls = {
        "save": lambda: trackbed.save({"step": 1}, folder / "plain", group=group),
        "load": lambda: trackbed.load(folder / "plain", group=group),
        "latest_checkpoint": lambda: trackbed.latest_checkpoint(folder, group=group),
        "sharded_state": lambda: trackbed.save(
            trackbed.sharded_state(module, group=group), folder / "step-1", group=group
        ),
        "load_sharded_state": lambda: trackbed.load_sharded_state(folder / "step-1", module, group=group),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ""
        except ArgumentError as error:
            found[name] = str(error)
    print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
