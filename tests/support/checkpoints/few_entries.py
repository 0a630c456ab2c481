"""States of a few tensors of four elements, and an object."""

import torch

from trackbed.checkpoint import ShardedObject, ShardedTensor


def tensor(key, data, *cuts, **options):
    return ShardedTensor.from_rank_offsets(key, data, *cuts, **options)


def state(*keys):
    return {key: tensor(key, torch.arange(4.0)) for key in keys} | {"o": ShardedObject("o", 5, (1,), (0,))}


def wanted(*keys):
    return {key: tensor(key, torch.zeros(4)) for key in keys}
