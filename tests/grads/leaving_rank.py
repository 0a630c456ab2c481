"""Ranks that gather parameters at the end of a training: the last one ends at once, the others need its parameters."""

import json
import time

import torch.distributed as dist

from tests.support.models.data_parallel import Case, run_steps, wrap


def main():
    """Runs one rank."""
    dist.init_process_group("gloo")
    case = Case(steps=2, options={"use_distributed_optimizer": True, "overlap_grad_reduce": True})
    case.options["overlap_param_gather"] = True
    wrapper, optimizer = wrap(None, case)
    if dist.get_rank() == dist.get_world_size() - 1:
        run_steps(wrapper, optimizer, case)
        return
    run_steps(wrapper, optimizer, case, 0, 1)
    optimizer.zero_grad()
    run = optimizer.model.engine.start_param_sync

    def start(**options):
        time.sleep(1.0)  # the other rank has ended meanwhile
        run(**options)

    optimizer.model.engine.start_param_sync = start
    run_steps(wrapper, optimizer, case, 1, 2)
    state = wrapper.state_dict()
    print(json.dumps(all(bool(value.isfinite().all()) for value in state.values())))


if __name__ == "__main__":
    main()
