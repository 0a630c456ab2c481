"""The interface of a blend's order: which sample of which dataset stands at a position.

Shapes: K datasets, N samples, B positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Allocate, Arrays, Entry, Request
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.index_arrays import IndexArrays
from trackbed.datasets.megatron import MegatronDataset
from trackbed.datasets.samples import Draws
from trackbed.errors import OversampleError
from trackbed.index import PERMUTATION_VERSION, InstantOrder, Order, Split
from trackbed.index.balanced import BALANCED_VERSION

__all__ = ["BlendOrder", "BlendSpec", "own_decisions"]


@dataclass(frozen=True)
class BlendSpec:
    """What decides the order of a blend.

    Args:
        datasets: `[K]` datasets.
        weights: `[K]` shares if `size` is given, else the number of samples that each dataset gives.
        size: N, or None for the sum of the weights.
        split: the split of the datasets.
        config: configuration of the blend.
    """

    datasets: Sequence[MegatronDataset]
    weights: Sequence[float]
    size: int | None
    split: Split
    config: BlendedMegatronDatasetConfig

    @property
    def num_samples(self) -> int:
        """N."""
        return int(sum(self.weights)) if self.size is None else self.size

    def check_draws(self, drawn: Sequence[int]) -> None:
        """Raises OversampleError if a dataset has fewer samples than the `[K]` that are drawn from it."""
        for number, (dataset, count) in enumerate(zip(self.datasets, drawn, strict=True)):
            if not dataset.can_give(count):
                msg = (
                    f"{dataset.dataset_path}, split {self.split.name}: the blend may draw at most the "
                    f"{len(dataset)} samples of dataset {number}, found {count}; raise mid_level_dataset_surplus, "
                    f"now {self.config.mid_level_dataset_surplus}"
                )
                raise OversampleError(msg)


class BlendOrder(Protocol):
    """The order of a blend, as its dataset needs it. All positions are in `[0, N)`."""

    @property
    def index(self) -> IndexArrays:
        """The index that holds the order; without arrays where none does."""
        ...

    @property
    def id_dtype(self) -> torch.dtype:
        """Dtype of the datasets' numbers in a batch."""
        ...

    @property
    def order(self) -> Order | None:
        """The order of many positions; None if it has no positions."""
        ...

    def decisions(self) -> dict[str, Any]:
        """Everything that decides the order, besides datasets, weights and size."""
        ...

    def check(self) -> None:
        """Raises an error if the datasets cannot give what is drawn from them, where that is known without an index."""
        ...

    def request(self, entry: Callable[[], Entry | None]) -> Request | None:
        """Returns the request for the index, None if it is kept in memory; `entry` gives that of Megatron Core."""
        ...

    def build(self, allocate: Allocate) -> Arrays:
        """Builds the arrays of the index."""
        ...

    def sample_at(self, position: int) -> tuple[int, int]:
        """Dataset and sample at a position; raises CacheError if the index is damaged."""
        ...

    def label(self, number: int) -> Any:
        """The number of a dataset as a sample states it."""
        ...

    def draw(self, positions: npt.NDArray[np.int64]) -> Draws:
        """`[B]` dataset and `[B]` sample at positions in `[-N, N)`; raises IndexError at others."""
        ...


def own_decisions(config: BlendedMegatronDatasetConfig) -> dict[str, Any]:
    """Everything that decides an order that is not Megatron Core's, besides datasets, weights and size."""
    stages = [[int(first), [float(weight) for weight in weights]] for first, weights in config.blend_stages or ()]
    return {
        "random_seed": int(config.random_seed),
        "versions": [BALANCED_VERSION, InstantOrder.VERSION, PERMUTATION_VERSION],
        "stages": stages,
        "limits": [config.blend_max_epochs, config.blend_when_exhausted] if config.blend_max_epochs else [],
        "locality": [config.shuffle_block, config.shuffle_window],
    }
