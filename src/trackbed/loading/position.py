"""The position in the data as state: how far a run has come, and in which order of which files."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import index
from typing import Any, Final

from trackbed.errors import ArgumentError
from trackbed.kernels.whole import is_whole

__all__ = ["Position", "check_data_checksum", "check_mapping"]

logger = logging.getLogger(__name__)

VERSION: Final = 1
_MOST_SAMPLES: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What a run must know to go on where it stopped."""

    consumed_samples: int
    """Samples that all ranks together have trained on."""
    total_samples: int
    """Samples of the dataset."""
    order: str
    """Which sampler puts them in order."""
    fingerprint: str | None
    """SHA-256 of files, configuration and order, or None where nobody gave it."""
    samples_per_epoch: int | None = None
    """Where the order goes round in epochs: after how many samples."""
    permuted: int | None = None
    """Where the order is a permutation: of how many samples. It follows from micro batch and, if sharded, ranks."""
    data_parallel_size: int | None = None
    """Number of ranks, where the order depends on it."""

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values, to be kept in a checkpoint."""
        values = {name: getattr(self, name) for name in _names()}  # `asdict` copies, which a batch has no time for
        return {"version": VERSION, **values}

    def resumed(self, state: Mapping[str, Any]) -> "Position":
        """This position, moved to where `state` was taken.

        Raises:
            ArgumentError: `state` is no position, of another version, of other data, or of another order.
        """
        check_mapping(state)
        if state.get("version") != VERSION:
            msg = f"the state of a sampler must have version {VERSION}, found {state.get('version')}"
            raise ArgumentError(msg)
        if self.fingerprint is None:
            logger.warning("a run goes on without a fingerprint: whether its data are the same cannot be checked")
        for name in ("fingerprint", "total_samples", "order", "data_parallel_size", "permuted"):
            if state.get(name) != getattr(self, name):
                found = getattr(self, name)
                msg = f"a run can go on only with the {name} it had: {state.get(name)!r}, found {found!r}"
                raise ArgumentError(msg)
        consumed: Any = state.get("consumed_samples")
        if not is_whole(consumed) or not 0 <= consumed < _MOST_SAMPLES:
            msg = f"the state of a sampler must have consumed_samples in [0, 2**62), found {consumed!r}"
            raise ArgumentError(msg)
        per_epoch: Any = state.get("samples_per_epoch")
        if per_epoch is not None and (not is_whole(per_epoch) or not 0 < per_epoch < _MOST_SAMPLES):
            msg = f"the state of a sampler must have samples_per_epoch in [1, 2**62) or None, found {per_epoch!r}"
            raise ArgumentError(msg)
        epochs = {consumed // size for size in (state.get("samples_per_epoch"), self.samples_per_epoch) if size}
        if state.get("samples_per_epoch") != self.samples_per_epoch and epochs != {0}:
            msg = (
                "a run can go on after its first epoch only with the samples_per_epoch it had: "
                f"{state.get('samples_per_epoch')}, found {self.samples_per_epoch}"
            )
            raise ArgumentError(msg)
        return replace(self, consumed_samples=index(consumed))


def check_mapping(state: object) -> None:
    """Refuse a state that is no mapping.

    Raises:
        ArgumentError: it is something else.
    """
    if not isinstance(state, Mapping):
        msg = f"a state must be a mapping, as state_dict returns it, found a {type(state).__name__}"
        raise ArgumentError(msg)


def check_data_checksum(state: Mapping[str, Any], found: str) -> None:
    """Refuse a position whose data had other contents than those of today; warn where it does not say.

    Args:
        state: the position, with `data_checksum`, which positions of older versions lack.
        found: the checksum of the data as they are.

    Raises:
        ArgumentError: the checksums differ; the message has both.
    """
    saved = state.get("data_checksum")
    if saved is None:
        logger.warning(
            "a run goes on from a position without data_checksum, as older versions of Trackbed save it: "
            "whether its data were made again since cannot be checked"
        )
    elif saved != found:
        msg = (
            f"a run can go on only with the data it had: data_checksum was {saved!r}, found {found!r}; "
            "its files were made again, with other documents or in another order"
        )
        raise ArgumentError(msg)


@cache
def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Position))
