"""Megatron Core's functions on indices, over Trackbed's kernels, with the same results to the bit.

Each takes Megatron's own function first, and calls it where the arguments are not of the kind that Megatron's datasets
pass, so that those give what they gave before.

Shapes: D documents in the file or of the split, E epochs, V visits to documents, K datasets, N samples.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.index.ranges import count_from
from trackbed.index.shuffle import shuffle_index_dtype
from trackbed.kernels.integers import is_integer
from trackbed.megatron import functions

Own = Callable[..., Any]
"""Megatron's own function."""

_MOST: Final = 2**31 - 1
_MOST_TOKENS: Final = 2**53
"""From here on, Megatron's arithmetic in single precision would depend on how an integer is rounded."""


def build_document_index(
    own: Own,
    documents: Any,
    num_epochs: Any,
    numpy_random_state: Any,
    separate_final_epoch: Any,
) -> npt.NDArray[np.int32]:
    """Returns the `[E * D]` document of each visit, shuffled; a separate last epoch on its own."""
    is_usual = _is_vector(documents) and _is_in(num_epochs, 1, _MOST) and _is_mersenne_twister(numpy_random_state)
    if not is_usual:
        found: npt.NDArray[np.int32] = own(documents, num_epochs, numpy_random_state, separate_final_epoch)
        return found
    visits = np.empty((num_epochs, len(documents)), dtype=np.int32)
    visits[:] = documents
    first_epochs = num_epochs - 1 if separate_final_epoch else 0
    _shuffle(numpy_random_state, visits[:first_epochs].reshape(-1), visits[first_epochs:].reshape(-1))
    return visits.reshape(-1)


def build_shuffle_index(
    own: Own, num_samples: Any, total_size: Any, numpy_random_state: Any
) -> npt.NDArray[np.integer[Any]]:
    """Returns the `[N]` sample at each position: the first `num_samples` shuffled, and then the others."""
    is_usual = _is_in(total_size, 0, _MOST_TOKENS) and _is_in(num_samples, 0, total_size)
    if not (is_usual and _is_mersenne_twister(numpy_random_state)):
        found: npt.NDArray[np.integer[Any]] = own(num_samples, total_size, numpy_random_state)
        return found
    order: npt.NDArray[np.integer[Any]] = np.empty(total_size, dtype=shuffle_index_dtype(total_size))
    count_from(order, 0)
    _shuffle(numpy_random_state, order[:num_samples], order[num_samples:])
    return order


def build_sample_idx(
    own: Own,
    sizes: Any,
    document_indices: Any,
    sequence_length: Any,
    num_epochs: Any,
    tokens_per_epoch: Any,
    drop_last_partial_sequence: Any = True,
    add_extra_token_to_sequence: Any = True,
) -> npt.NDArray[np.integer[Any]]:
    """Returns the `[N + 1, 2]` visit and offset at which each sample starts."""
    is_usual = (
        all(_is_vector(one, np.int32) and len(one) for one in (sizes, document_indices))
        and _is_in(sequence_length, 2, _MOST - 1)
        and _is_in(num_epochs, 1, _MOST)
        and _is_in(tokens_per_epoch, 2, _MOST_TOKENS // int(num_epochs))
        and isinstance(drop_last_partial_sequence, (bool, np.bool_))
        and not (add_extra_token_to_sequence and _ends_empty(sizes, document_indices))
    )
    if not is_usual:
        found: npt.NDArray[np.integer[Any]] = own(
            sizes,
            document_indices,
            sequence_length,
            num_epochs,
            tokens_per_epoch,
            drop_last_partial_sequence,
            add_extra_token_to_sequence,
        )
        return found
    return functions.build_sample_idx(
        sizes,
        document_indices,
        int(sequence_length),
        int(num_epochs),
        int(tokens_per_epoch),
        bool(drop_last_partial_sequence),
        bool(add_extra_token_to_sequence),
    )


def build_blending_indices(
    own: Own,
    dataset_index: Any,
    dataset_sample_index: Any,
    weights: Any,
    num_datasets: Any,
    size: Any,
    verbose: Any,
    /,
) -> None:
    """Fills the first `size` elements of both outputs greedily."""
    shares = _numbers(weights, "iuf", num_datasets)
    is_usual = (
        not verbose
        and shares is not None
        and bool((np.isfinite(shares) & (shares >= 0)).all())
        and _are_outputs(dataset_index, dataset_sample_index)
        and _is_in(size, 0, min(len(dataset_index), len(dataset_sample_index)))
    )
    if is_usual:
        functions.build_blending_indices(dataset_index, dataset_sample_index, shares, num_datasets, size)
    else:
        own(dataset_index, dataset_sample_index, weights, num_datasets, size, verbose)


def build_exhaustive_blending_indices(
    own: Own, dataset_index: Any, dataset_sample_index: Any, sizes: Any, num_datasets: Any, /
) -> None:
    """Fills the outputs with every sample of each dataset once."""
    counts = _numbers(sizes, "iu", num_datasets)
    is_usual = counts is not None and bool((counts >= 1).all()) and _are_outputs(dataset_index, dataset_sample_index)
    total = sum(counts.tolist()) if is_usual and counts is not None else 0
    if is_usual and total <= min(len(dataset_index), len(dataset_sample_index)):
        functions.build_exhaustive_blending_indices(
            dataset_index[:total], dataset_sample_index[:total], counts, num_datasets
        )
    else:
        own(dataset_index, dataset_sample_index, sizes, num_datasets)


def _shuffle(state: np.random.RandomState, *parts: npt.NDArray[np.integer[Any]]) -> None:
    """Shuffles vectors one after the other as `state` would, which then goes on behind them."""
    whole: Any = state.get_state(legacy=False)
    twister = np.append(whole["state"]["key"], np.uint32(whole["state"]["pos"]))
    for part in parts:
        kernels.legacy_shuffle(twister, part)
    whole["state"] = {"key": twister[:-1], "pos": int(twister[-1])}
    state.set_state(whole)


def _is_mersenne_twister(state: Any) -> bool:
    """True for NumPy's own `RandomState`, over the generator that it has unless another one is given."""
    if type(state) is not np.random.RandomState:
        return False
    whole: Any = state.get_state(legacy=False)
    return bool(whole["bit_generator"] == "MT19937")


def _is_vector(array: Any, dtype: type[np.integer[Any]] | None = None) -> bool:
    """True for a vector of integers: of this type, or of any."""
    if type(array) not in (np.ndarray, np.memmap) or array.ndim != 1:
        return False
    return array.dtype.kind in "iu" if dtype is None else array.dtype == dtype


def _is_in(value: Any, lowest: int, highest: int) -> bool:
    return is_integer(value) and lowest <= value <= highest


def _ends_empty(sizes: npt.NDArray[np.int32], visits: npt.NDArray[np.int32]) -> bool:
    """True if the last visit is to an empty document, before whose first token Megatron's last row may point."""
    last = int(visits[-1])
    return 0 <= last < len(sizes) and int(sizes[last]) == 0


def _numbers(values: Any, kinds: str, num_datasets: Any) -> npt.NDArray[Any] | None:
    """Returns the numbers of each dataset; None if they are not a vector of these kinds, or not as many."""
    if not isinstance(values, (list, tuple, np.ndarray)) or not _is_in(num_datasets, 1, _MOST):
        return None
    try:
        numbers = np.asarray(values)
    except ValueError:  # lists within a list
        return None
    is_usual = numbers.ndim == 1 and numbers.dtype.kind in kinds and len(numbers) >= num_datasets
    return numbers[:num_datasets] if is_usual else None


def _are_outputs(dataset_index: Any, dataset_sample_index: Any) -> bool:
    """True for arrays that Megatron's functions fill in place, and not a converted copy of them."""
    pairs = ((dataset_index, np.int16), (dataset_sample_index, np.int64))
    return all(_is_vector(array, dtype) and array.flags.carray for array, dtype in pairs)
