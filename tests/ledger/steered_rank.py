"""One rank of a run whose blend changes: `steered_rank.py BLEND RUN CASE`. Writes what it has seen as JSON."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

import trackbed
from tests.ledger.run_rank import GLOBAL_BATCH, losses_of
from tests.support.files.rewrite import rewrite
from trackbed.errors import TrackbedError
from trackbed.ledger import read_run, steering


def train(run, folder, case, blend):
    rank = dist.get_rank()
    batches = iter(run.loader(batch_size=GLOBAL_BATCH // 2))
    if case == "one cannot" and rank == 1:

        def cannot(*_):
            raise TrackbedError("this rank cannot")

        run._steering.open_content = cannot
    if case == "differs":
        run.set_weights(3, {"a": 1 + rank, "b": 1})
    changed = 0
    for step in range(1, 401):
        run.record(losses_of(next(batches)))
        if rank == 0 and case != "differs" and step in (4, 8 + 2 * changed):
            weights = "b = 1" if not changed else "a = 1, b = 5"
            changed += 1
            if changed <= (2 if case == "file" else 1):
                text = blend.read_text() + f"\n[[stage]]\nfrom_sample = {step * 8}\nweights = {{{weights}}}\n"
                rewrite(blend, text)
        events = [one["event"] for one in read_run(folder).events]
        over = events.count("blend") >= 2 if case == "file" else "refused" in events
        flags = [None, None]
        dist.all_gather_object(flags, over)
        if all(flags):
            return


def main():
    blend, folder, case = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    steering.SETTLE_SECONDS = 0.0
    dist.init_process_group("gloo")
    result = {}
    try:
        with trackbed.open_run(folder, blend=blend) as run:
            train(run, folder, case, blend)
            result["stages"] = run._steering.version.state()["stages"]
        result["events"] = [one["event"] for one in read_run(folder).events]
    except TrackbedError as error:
        result["error"] = str(error)
    result["steps"] = run.step
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
