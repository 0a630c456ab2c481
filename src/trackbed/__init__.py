"""Tokens in, gradients across, checkpoints out: the layers under a model in LLM pre-training.

Begin with `open_blend` and `BatchLoader` for data, `DistributedDataParallel` and `DataParallelOptimizer` for gradients,
`sharded_state`, `save` and `load_sharded_state` for checkpoints; `open_run` records what was fed. Names and packages
are imported when they are first used. Each layer has more in its package: `trackbed.tokens`, `trackbed.preprocess`,
`trackbed.datasets`, `trackbed.builder`, `trackbed.blends`, `trackbed.loading`, `trackbed.ledger`, `trackbed.grads`,
`trackbed.optim` and `trackbed.checkpoint`; `trackbed.megatron` puts them under Megatron Core's names.
"""

from typing import TYPE_CHECKING

from trackbed.lazy_names import lazy_names
from trackbed.version import __version__ as __version__

if TYPE_CHECKING:
    from trackbed import blends as blends
    from trackbed import builder as builder
    from trackbed import checkpoint as checkpoint
    from trackbed import comm as comm
    from trackbed import datasets as datasets
    from trackbed import errors as errors
    from trackbed import grads as grads
    from trackbed import index as index
    from trackbed import ledger as ledger
    from trackbed import loading as loading
    from trackbed import losses as losses
    from trackbed import megatron as megatron
    from trackbed import optim as optim
    from trackbed import preprocess as preprocess
    from trackbed import tokens as tokens
    from trackbed.blends.open import Splits as Splits
    from trackbed.blends.open import open_blend as open_blend
    from trackbed.checkpoint import Checkpoint as Checkpoint
    from trackbed.checkpoint import ShardedObject as ShardedObject
    from trackbed.checkpoint import ShardedTensor as ShardedTensor
    from trackbed.checkpoint import latest_checkpoint as latest_checkpoint
    from trackbed.checkpoint import load as load
    from trackbed.checkpoint import open_checkpoint as open_checkpoint
    from trackbed.checkpoint import random_states as random_states
    from trackbed.checkpoint import restore_random_states as restore_random_states
    from trackbed.checkpoint import save as save
    from trackbed.checkpointer import Checkpointer as Checkpointer
    from trackbed.datasets import Batch as Batch
    from trackbed.datasets.blend.dataset import SplitDataset as SplitDataset
    from trackbed.errors import ArgumentError as ArgumentError
    from trackbed.errors import BlendFileError as BlendFileError
    from trackbed.errors import CacheError as CacheError
    from trackbed.errors import CheckpointError as CheckpointError
    from trackbed.errors import CollectiveError as CollectiveError
    from trackbed.errors import FormatError as FormatError
    from trackbed.errors import GradientError as GradientError
    from trackbed.errors import OversampleError as OversampleError
    from trackbed.errors import PlanError as PlanError
    from trackbed.errors import RunError as RunError
    from trackbed.errors import StoreError as StoreError
    from trackbed.errors import TrackbedError as TrackbedError
    from trackbed.grads import DistributedDataParallel as DistributedDataParallel
    from trackbed.grads import DistributedDataParallelConfig as DistributedDataParallelConfig
    from trackbed.ledger.run import Run as Run
    from trackbed.ledger.run import open_run as open_run
    from trackbed.loading.balanced_sampler import BalancedSampler as BalancedSampler
    from trackbed.loading.loader import BatchLoader as BatchLoader
    from trackbed.optim import DataParallelOptimizer as DataParallelOptimizer
    from trackbed.optim import StepReport as StepReport
    from trackbed.optim import load_sharded_state as load_sharded_state
    from trackbed.optim import sharded_state as sharded_state

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "trackbed.blends.open": "Splits open_blend",
        "trackbed.checkpoint": "Checkpoint ShardedObject ShardedTensor latest_checkpoint load open_checkpoint "
        "random_states restore_random_states save",
        "trackbed.checkpointer": "Checkpointer",
        "trackbed.datasets": "Batch",
        "trackbed.datasets.blend.dataset": "SplitDataset",
        "trackbed.errors": (
            "ArgumentError BlendFileError CacheError CheckpointError CollectiveError FormatError GradientError "
            "OversampleError PlanError RunError StoreError TrackbedError"
        ),
        "trackbed.grads": "DistributedDataParallel DistributedDataParallelConfig",
        "trackbed.ledger.run": "Run open_run",
        "trackbed.loading.balanced_sampler": "BalancedSampler",
        "trackbed.loading.loader": "BatchLoader",
        "trackbed.optim": "DataParallelOptimizer StepReport load_sharded_state sharded_state",
    },
    present="__version__",
    modules="blends builder checkpoint comm datasets errors grads index ledger loading losses megatron optim "
    "preprocess tokens",
)
