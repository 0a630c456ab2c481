"""The order "instant" of a blend, which is computed on each access.

Shapes: K datasets, N samples, B positions.
"""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Allocate, Arrays, Entry, Request
from trackbed.datasets.blend.order import BlendSpec, own_decisions
from trackbed.datasets.gpt.computed import StoredSample
from trackbed.datasets.samples import NO_INDEX, IndexArrays, SampleLocations
from trackbed.errors import ArgumentError, PlanError
from trackbed.index import BlendStage, InstantOrder, Split
from trackbed.index.prefetch import PrefetchedOrder

logger = logging.getLogger(__name__)


class InstantBlend:
    """Order that is computed on each access. See `BlendOrder`."""

    id_dtype: Final = torch.int64
    index: ClassVar[IndexArrays] = NO_INDEX

    def __init__(self, spec: BlendSpec) -> None:
        self._spec = spec
        try:
            self.order = self._make() if spec.num_samples else None
        except (ArgumentError, PlanError) as error:
            datasets = spec.datasets
            paths = ", ".join(str(dataset.dataset_path) for dataset in datasets[:3])
            raise PlanError(
                f"the blend of {paths}{' ...' if len(datasets) > 3 else ''}, split {spec.split.name}: {error}"
            ) from error

    def _make(self) -> InstantOrder:
        spec, config, is_training = self._spec, self._spec.config, self._spec.split is Split.train
        stages = [BlendStage(0, tuple(spec.weights))]
        if is_training:
            stages += [BlendStage(*stage) for stage in config.blend_stages or ()]
        order = InstantOrder.staged(
            sizes=[dataset.samples_per_epoch for dataset in spec.datasets],  # type: ignore[attr-defined]
            stages=stages,
            seed=config.random_seed,
            num_samples=spec.num_samples,
            max_epochs=config.blend_max_epochs if is_training else None,
            when_exhausted=config.blend_when_exhausted,
            block=config.shuffle_block,
            window=config.shuffle_window,
        )
        for ended in order.exhaustions:
            prefix = spec.datasets[ended.dataset].dataset_path
            logger.warning(
                "%s: has reached its limit of epochs; the blend goes on without it from sample %d",
                prefix,
                ended.sample,
            )
        return order

    def __getstate__(self) -> dict[str, Any]:
        """Returns the spec and the order, without prefetched positions."""
        return {"_spec": self._spec, "order": self.order}

    def check(self) -> None:
        """Does nothing: the constructor checks the order."""

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the order, besides datasets, weights and size."""
        return own_decisions(self._spec.config)

    def request(self, entry: Callable[[], Entry | None]) -> Request | None:
        """Returns None: there is no index."""
        return None

    def build(self, allocate: Allocate) -> Arrays:
        """Returns no arrays."""
        return {}

    def label(self, number: int) -> Any:
        """Returns the number of a dataset."""
        return number

    def sample_at(self, position: int) -> tuple[int, int]:
        """Returns dataset and sample at a position."""
        datasets, samples = (
            self._located.locate_visits([position]) if self._has_visits else self._located.locate([position])
        )
        return int(datasets[0]), StoredSample(samples[0])

    def draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns `[B]` dataset and `[B]` sample at positions."""
        if self.order is None:
            return np.zeros(0, dtype=np.int32)[positions], positions
        return self._prefetched.locate(positions)

    @cached_property
    def _prefetched(self) -> PrefetchedOrder:
        return PrefetchedOrder(self._located, has_visits=self._has_visits)

    @property
    def _has_visits(self) -> bool:
        """True for packs, whose documents depend on the epoch."""
        return self._spec.config.order == "packed"

    @property
    def _located(self) -> InstantOrder:
        if self.order is None:
            raise PlanError("a blend must have samples to locate one, found none")
        return self.order
