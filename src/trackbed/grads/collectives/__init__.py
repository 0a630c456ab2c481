"""Collectives on buffers of gradients and parameters."""

from trackbed.grads.collectives.over_shared_memory import SharedMemoryCollectives
from trackbed.grads.collectives.protocol import (
    DONE,
    BackendError,
    Collectives,
    Exchange,
    Fetch,
    Label,
    SoloCollectives,
    Work,
    shard_of,
)
from trackbed.grads.collectives.torch import TorchCollectives

__all__ = [
    "DONE",
    "BackendError",
    "Collectives",
    "Exchange",
    "Fetch",
    "Label",
    "SharedMemoryCollectives",
    "SoloCollectives",
    "TorchCollectives",
    "Work",
    "shard_of",
]
