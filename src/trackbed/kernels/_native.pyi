from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_Poll = Callable[[int], object] | None
PERMUTATION_VERSION: int
SQUARE_SUM_SIZE: int
compiler: str

_Ids = npt.NDArray[np.integer[Any]]

def best_isa() -> int: ...
def seed_twister(twister: npt.NDArray[np.uint32], seed: int, /) -> None: ...
def legacy_shuffle(
    twister: npt.NDArray[np.uint32],
    array: npt.NDArray[np.unsignedinteger[Any]],
    level: int,
    poll: _Poll,
    /,
) -> None: ...
def small_indices(
    datasets: npt.NDArray[np.int64],
    lengths: list[npt.NDArray[np.uint8]],
    indices: npt.NDArray[np.uint32],
    level: int,
    poll: _Poll,
    /,
) -> int: ...
def square_sum(
    numbers: npt.NDArray[Any],
    number: int,
    total: npt.NDArray[np.int64],
    level: int,
    num_threads: int,
    poll: _Poll,
    /,
) -> None: ...
def find_documents(
    borders: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.uint8],
    min_sentences: int,
    documents: npt.NDArray[np.int64],
    poll: _Poll,
    /,
) -> int: ...
def build_mapping(
    documents: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.uint8],
    rules: npt.NDArray[np.int64],
    is_wide: bool,
    poll: _Poll,
    /,
) -> npt.NDArray[np.unsignedinteger[Any]]: ...
def assign_least_loaded(
    costs: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    loads: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.int64],
    /,
) -> None: ...
def sum_ranks(
    buffers: list[npt.NDArray[Any]],
    number: int,
    start: int,
    stop: int,
    factor: float,
    divisor: float,
    owner: int,
    level: int,
    num_threads: int,
    poll: _Poll,
    /,
) -> None: ...
def count_tokens(lengths: npt.NDArray[np.uint8]) -> tuple[int, int]: ...
def narrow(source: npt.NDArray[Any], target: str, /) -> tuple[bytes, int]: ...
def permute(
    size: int,
    key: int,
    positions: npt.NDArray[np.int64],
    images: npt.NDArray[np.int64],
    level: int,
    num_threads: int,
    poll: Callable[[int], object] | None,
    /,
) -> None: ...
def find_position(size: int, key: int, image: int, /) -> int: ...
def permute_blocks(
    size: int,
    key: int,
    block: int,
    window: int,
    positions: npt.NDArray[np.int64],
    images: npt.NDArray[np.int64],
    level: int,
    num_threads: int,
    poll: Callable[[int], object] | None,
    /,
) -> None: ...
def greedy_blend(
    weights: npt.NDArray[np.float64],
    dataset_index: _Ids,
    dataset_sample_index: npt.NDArray[np.int64],
    level: int,
    poll: _Poll,
    /,
) -> None: ...
def exhaustive_blend(
    sizes: npt.NDArray[np.int64],
    dataset_index: _Ids,
    dataset_sample_index: npt.NDArray[np.int64],
    level: int,
    poll: _Poll,
    /,
) -> None: ...
def balanced_blend(
    sizes: npt.NDArray[np.int64],
    key: int,
    dataset_index: _Ids,
    dataset_sample_index: _Ids,
    level: int,
    num_threads: int,
    poll: _Poll,
    /,
) -> None: ...
def sample_index(
    lengths: npt.NDArray[np.uint8],
    visits: npt.NDArray[np.integer[Any]],
    sequence_length: int,
    extra_token: int,
    rows: npt.NDArray[np.integer[Any]],
    num_threads: int,
    poll: _Poll,
    /,
) -> int: ...
def pair_lengths(
    documents: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.uint8],
    pairs: npt.NDArray[np.uint64],
    poll: _Poll,
    /,
) -> None: ...
def cut_pairs(
    pairs: npt.NDArray[np.uint64],
    documents: npt.NDArray[np.int32],
    sequence_length: int,
    extra_token: int,
    rows: npt.NDArray[np.int32],
    num_threads: int,
    poll: _Poll,
    /,
) -> int: ...
def permutations_of(sizes: npt.NDArray[np.int64], /) -> npt.NDArray[np.uint64]: ...
def instant_locate(
    nodes: npt.NDArray[np.uint64],
    first_samples: npt.NDArray[np.int64],
    first_nodes: npt.NDArray[np.int64],
    roots: npt.NDArray[np.uint32],
    ramps: npt.NDArray[np.int64],
    parents: npt.NDArray[np.uint32],
    permutations: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    block: int,
    window: int,
    positions: npt.NDArray[np.int64],
    datasets: npt.NDArray[np.int32],
    draws: npt.NDArray[np.int64],
    samples: npt.NDArray[np.int64],
    num_threads: int,
    poll: _Poll,
    /,
) -> None: ...
def new_workers() -> object: ...
def gather(
    workers: object,
    sources: npt.NDArray[np.uint64],
    files: npt.NDArray[np.uint64],
    fetched: npt.NDArray[np.uint64],
    datasets: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    shape: npt.NDArray[np.uint64],
    rows: npt.NDArray[np.uint64],
    level: int,
    num_threads: int,
    poll: _Poll,
    /,
) -> tuple[int, list[int], list[int]]: ...
def gather_masked(
    workers: object,
    sources: npt.NDArray[np.uint64],
    files: npt.NDArray[np.uint64],
    fetched: npt.NDArray[np.uint64],
    datasets: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    rules: npt.NDArray[np.uint64],
    rows: npt.NDArray[np.uint64],
    level: int,
    num_threads: int,
    poll: _Poll,
    /,
) -> tuple[int, list[int], list[int]]: ...
def legacy_draws(
    seed: int,
    kinds: npt.NDArray[np.uint8],
    arguments: npt.NDArray[np.float64],
    cumulative: npt.NDArray[np.float64],
    results: npt.NDArray[np.float64],
    level: int,
    /,
) -> None: ...
def draw_phases(nodes: npt.NDArray[np.uint64], num_leaves: int, key: int, /) -> None: ...
def interleaving_counts(
    nodes: npt.NDArray[np.uint64],
    root: int,
    position: int,
    counts: npt.NDArray[np.int64],
    /,
) -> None: ...
def plan_packs(
    counts: npt.NDArray[np.uint64], most_items: int, /
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int]: ...
def count_items(
    lengths: npt.NDArray[np.int32], shape: tuple[int, int, int], counts: npt.NDArray[np.uint64], /
) -> None: ...
def sort_items(
    lengths: npt.NDArray[np.int32],
    shape: tuple[int, int, int],
    counts: npt.NDArray[np.uint64],
    documents: npt.NDArray[np.uint32],
    /,
) -> None: ...
def find_packs(
    nodes: npt.NDArray[np.uint64],
    leaves: npt.NDArray[np.uint64],
    first_items: npt.NDArray[np.uint64],
    documents: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int32],
    shape: tuple[int, int, int],
    packs: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    /,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
def find_visits(
    nodes: npt.NDArray[np.uint64],
    leaves: npt.NDArray[np.uint64],
    first_items: npt.NDArray[np.uint64],
    documents: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int32],
    shape: tuple[int, int, int],
    num_packs: int,
    seed: int,
    visits: npt.NDArray[np.int64],
    /,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
def join_borders(
    places: npt.NDArray[np.int32],
    padded: npt.NDArray[np.int32],
    trained: npt.NDArray[np.int32],
    longest: npt.NDArray[np.int32],
    num_trained: npt.NDArray[np.int64],
    num_documents: npt.NDArray[np.int64],
    keeps_all: bool,
    /,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], int]: ...
def leaf_costs(
    nodes: npt.NDArray[np.uint64],
    leaves: npt.NDArray[np.uint64],
    multiple: int,
    linear: int,
    costs: npt.NDArray[np.int64],
    /,
) -> None: ...
def find_costs(
    first_packs: npt.NDArray[np.uint64],
    leaf_costs: npt.NDArray[np.int64],
    packs: npt.NDArray[np.uint64],
    costs: npt.NDArray[np.int64],
    /,
) -> None: ...
def deal_packs(costs: npt.NDArray[np.int64], num_ranks: int, dealt: npt.NDArray[np.int64], /) -> None: ...
def gather_packs(
    workers: object,
    sources: npt.NDArray[np.uint64],
    files: npt.NDArray[np.uint64],
    fetched: npt.NDArray[np.uint64],
    trained: npt.NDArray[np.uint64],
    datasets: npt.NDArray[np.int32],
    pieces: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    shape: npt.NDArray[np.uint64],
    rows: npt.NDArray[np.uint64],
    level: int,
    num_threads: int,
    poll: _Poll,
    /,
) -> tuple[int, list[int], list[int]]: ...
