"""One gloo rank that trains in several ways: `bits_rank.py WAYS`. Writes one line of JSON for each.

WAYS is a list in JSON of [type of the parameters, number of micro-batches, options].
"""

import json
import sys

import torch
import torch.distributed as dist

from tests.support.models.data_parallel import Case, train


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # The expert's gradients are averaged over a group of its own, which holds the same ranks.
    experts = dist.new_group()
    for dtype, num_micro, options in json.loads(sys.argv[1]):
        case = Case(getattr(torch, dtype), num_micro, options=options)
        outcome = train(None, case, expert_process_group=experts)
        print(json.dumps([outcome.digest(), outcome.losses]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
