"""The position of a run in the data as checkpoint state: with the identity of the data and of the order, or a count."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice
from operator import index
from typing import Any, Final, Protocol, runtime_checkable

from trackbed.datasets.identity import DataChecksum, Identity
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import is_integer

logger = logging.getLogger(__name__)

VERSION: Final = 1
_MOST_SAMPLES: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """State from which a run resumes."""

    consumed_samples: int
    """Samples that all ranks together have trained on."""
    total_samples: int
    """Samples of the dataset."""
    order: str
    """Name of the sampler's order."""
    fingerprint: str | None
    """SHA-256 of files, configuration and order, or None if unknown."""
    samples_per_epoch: int | None = None
    """Samples per epoch, or None if the order has no epochs."""
    permuted: int | None = None
    """Size of the order's permutation, or None if the order is no permutation. Depends on the micro batch size, and on
    the number of ranks if sharded."""
    data_parallel_size: int | None = None
    """Number of ranks if the order depends on it, else None."""

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values for a checkpoint."""
        values = {name: getattr(self, name) for name in _names()}  # `asdict` copies, which is too slow for every batch
        return {"version": VERSION, **values}

    def resumed(self, state: Mapping[str, Any], *, identity: Identity | None = None) -> "Position":
        """This position, moved to the samples that `state` says.

        Args:
            state: the saved position.
            identity: what the samples are computed from: it accepts the same samples under another fingerprint, and
                names what differs.

        Raises:
            ArgumentError: `state` is not a position, or has another version, other data or another order.
        """
        check_mapping(state)
        if state.get("version") != VERSION:
            raise ArgumentError(f"the state of a sampler must have version {VERSION}, found {state.get('version')}")
        if self.fingerprint is None:
            logger.warning("resuming without a fingerprint: cannot check that the data are the same")
        if identity is not None and identity.recognises(state):
            state = {**state, "fingerprint": self.fingerprint, "total_samples": self.total_samples}
        for name in ("fingerprint", "total_samples", "order", "data_parallel_size", "permuted"):
            if state.get(name) != getattr(self, name):
                found = getattr(self, name)
                raise ArgumentError(f"a run can resume only with the saved {name} {state.get(name)!r}, found {found!r}")
        consumed: Any = state.get("consumed_samples")
        if not is_integer(consumed) or not 0 <= consumed < _MOST_SAMPLES:
            raise ArgumentError(f"the state of a sampler must have consumed_samples in [0, 2**62), found {consumed!r}")
        per_epoch: Any = state.get("samples_per_epoch")
        if per_epoch is not None and (not is_integer(per_epoch) or not 0 < per_epoch < _MOST_SAMPLES):
            raise ArgumentError(
                f"the state of a sampler must have samples_per_epoch in [1, 2**62) or None, found {per_epoch!r}"
            )
        epochs = {consumed // size for size in (state.get("samples_per_epoch"), self.samples_per_epoch) if size}
        if state.get("samples_per_epoch") != self.samples_per_epoch and epochs != {0}:
            raise ArgumentError(
                "a run can resume after its first epoch only with the saved samples_per_epoch "
                f"{state.get('samples_per_epoch')}, found {self.samples_per_epoch}"
            )
        return replace(self, consumed_samples=index(consumed))


_BALANCED: Final = re.compile(
    r"balanced in global batches of (?P<global_batch_size>[1-9][0-9]{0,18}) for hidden size "
    r"(?P<hidden_size>[1-9][0-9]{0,6})(, inside \[(?P<start>0|[1-9][0-9]{0,18}), (?P<stop>[1-9][0-9]{0,18})\)"
    r"( without (?P<left_out>[0-9a-f]{8}))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedOrder:
    """Name of the order of a `BalancedSampler` in a position.

    >>> BalancedOrder.parse("balanced in global batches of 8 for hidden size 64, inside [16, 24)").inside
    (16, 24)
    """

    global_batch_size: int
    hidden_size: int
    inside: tuple[int, int] | None = None
    """First position of the global batch that has begun, and the one after its last; None between global batches."""
    left_out: str | None = None
    """Checksum of the positions there that are left out; None without any."""

    def __str__(self) -> str:
        where = "" if self.inside is None else f", inside [{self.inside[0]}, {self.inside[1]})"
        where += "" if self.left_out is None else f" without {self.left_out}"
        return f"balanced in global batches of {self.global_batch_size} for hidden size {self.hidden_size}{where}"

    @classmethod
    def parse(cls, order: object) -> "BalancedOrder | None":
        """Returns the order of that name; None for the name of another."""
        found = _BALANCED.fullmatch(order) if isinstance(order, str) and order.isascii() else None
        if found is None:
            return None
        inside = None if found["start"] is None else (int(found["start"]), int(found["stop"]))
        sizes = {name: int(found[name]) for name in ("global_batch_size", "hidden_size")}
        return cls(**sizes, inside=inside, left_out=found["left_out"])


def check_mapping(state: object) -> None:
    """Checks that a state is a mapping."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"a state must be a mapping, as state_dict returns it, found a {type(state).__name__}")


def check_data(state: Mapping[str, Any], data: DataChecksum) -> None:
    """Checks that the data have the contents they had when a position was saved.

    A position without a fingerprint, of a sampler that was not told its dataset, need not have a checksum.

    Args:
        state: the position.
        data: checksum of the data as they are now; computed if it has to be.
    """
    saved = state.get("data_checksum")
    if saved is None and state.get("fingerprint") is None:
        logger.warning("resuming without data_checksum: cannot check whether the data were rewritten since")
    elif saved is None:
        raise ArgumentError(
            "a position with a fingerprint must have a data_checksum, found none: it was saved without a checksum; to "
            f"read on from there, give a new loader consumed_samples={state.get('consumed_samples')!r}"
        )
    elif saved == (checksum := data.confirm(state)):
        if None not in (state.get("data_stamps"), data.stamps) and state["data_stamps"] != data.stamps:
            logger.warning(
                "resuming over objects that were written anew since the position was saved: their documents have the "
                "same lengths, and may have other tokens"
            )
    else:
        raise ArgumentError(
            f"a run can resume only with unchanged data: data_checksum was {saved!r}, found {checksum!r}; "
            "the files were rewritten with other documents or in another order"
        )


@cache
def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Position))


_COUNT_VERSION: Final = 1


@runtime_checkable
class BatchSampler(Protocol):
    """Iterates over the indices of batches from its position on, and exposes that position as state."""

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Iterates over the indices of each batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position after the last yielded batch."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a position."""
        ...


class CountedBatches:
    """Batches of an iterable without a position of its own, whose position is the number of yielded batches.

    Args:
        batches: iterable that yields the same batches each time. It is restarted after the last one.

    >>> counted = CountedBatches([[0, 1], [2, 3], [4, 5]])
    >>> counted.load_state_dict({"version": 1, "batches": 1})
    >>> list(counted), list(counted)
    ([[2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]])
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = batches
        self._yielded = 0
        self._begin = 0

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Iterates over the batches from the position on."""
        self._yielded, self._begin = self._begin, 0
        for batch in islice(self._batches, self._yielded, None):
            self._yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Number of yielded batches."""
        return {"version": _COUNT_VERSION, "batches": self._yielded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes after the number of batches in `state`."""
        check_mapping(state)
        if state.get("version") != _COUNT_VERSION or not isinstance(state.get("batches"), int) or state["batches"] < 0:
            raise ArgumentError(
                f"the state of batches must have version {_COUNT_VERSION} and a number of batches, found {dict(state)}"
            )
        self._yielded = self._begin = state["batches"]
