"""One of four ranks, of which each second one has the same experts. Prints the values that it begins with."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))


def main():
    from tests.grads.test_initial_values import Experts
    from trackbed import DistributedDataParallel
    from trackbed.errors import CollectiveError

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(Experts(rank), expert_process_group=pairs[rank % 2])
    outcome = {}
    for kind, names in (
        ("shared", ["shared.weight", "shared_norm.running_mean", "cache.table"]),
        ("expert", ["expert.0.weight", "expert.1.running_mean", "expert.1.bias", "expert.cache.table"]),
    ):
        found = {value for name in names for value in model.module.state_dict()[name].flatten().tolist()}
        (outcome[kind],) = found
    module = Experts(rank % 2)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if "expert" not in name:
            value.data.fill_(0)
    DistributedDataParallel(module, expert_process_group=pairs[rank % 2], broadcast=False)
    try:
        with torch.no_grad():
            module.expert[0].weight.fill_(rank)
        DistributedDataParallel(module, expert_process_group=pairs[rank % 2], broadcast=False)
    except CollectiveError as error:
        outcome["differs"] = "expert.0.weight" in str(error)
    print(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
