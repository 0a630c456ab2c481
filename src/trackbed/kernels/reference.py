"""Reference implementations of the kernels: slow and short, they define correct results.

Shapes: K datasets, N samples, D documents, V visits, S samples.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.kernels.gather import SampleShape, SampleSources
from trackbed.kernels.small_indices import SmallDataset


def greedy_blend(
    weights: npt.NDArray[np.float64], num_samples: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`[N]` dataset and `[N]` sample of that dataset, always drawn from the dataset furthest behind its share.

    >>> greedy_blend(np.array([0.5, 0.25, 0.25]), 4)
    (array([0, 1, 2, 0]), array([0, 0, 0, 1]))
    """
    drawn = np.zeros(len(weights), dtype=np.int64)
    datasets = np.empty(num_samples, dtype=np.int64)
    samples = np.empty(num_samples, dtype=np.int64)
    for i in range(num_samples):
        errors = weights * np.float64(max(i, 1)) - drawn.astype(np.float64)
        dataset = int(errors.argmax())
        datasets[i], samples[i] = dataset, drawn[dataset]
        drawn[dataset] += 1
    return datasets, samples


def exhaustive_blend(
    sizes: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`[N]` dataset and `[N]` sample of that dataset, each dataset drawn exactly as often as its size.

    >>> exhaustive_blend(np.array([2, 1]))
    (array([0, 1, 0]), array([0, 0, 1]))
    """
    total = int(sizes.sum())
    weights = sizes.astype(np.float64) / np.float64(total)
    drawn = np.zeros(len(sizes), dtype=np.int64)
    datasets = np.empty(total, dtype=np.int64)
    samples = np.empty(total, dtype=np.int64)
    for i in range(total):
        errors = weights * np.float64(max(i, 1)) - drawn.astype(np.float64)
        errors[drawn == sizes] = -np.inf
        dataset = int(errors.argmax())
        datasets[i], samples[i] = dataset, drawn[dataset]
        drawn[dataset] += 1
    return datasets, samples


def legacy_shuffle(generator: np.random.RandomState, array: npt.NDArray[Any]) -> None:
    """Shuffle a vector in place: each element, from the last down, is swapped with a randomly drawn one.

    >>> shuffled = np.arange(5)
    >>> legacy_shuffle(np.random.RandomState(1234), shuffled)
    >>> shuffled.tolist()
    [4, 0, 1, 2, 3]
    """
    for last in range(len(array) - 1, 0, -1):
        mask = (1 << last.bit_length()) - 1
        target = last + 1
        while target > last:
            bits = np.frombuffer(generator.bytes(4 if mask < 2**32 else 8), dtype="<u4")
            # The first 32 of 64 bits are the upper half.
            target = int(bits[0] if len(bits) == 1 else int(bits[0]) << 32 | int(bits[1])) & mask
        array[[last, target]] = array[[target, last]]


def balanced_blend(
    sizes: npt.NDArray[np.int64], permuted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`[N]` dataset and `[N]` sample of that dataset, with all samples in turn permuted by `permuted`.

    >>> balanced_blend(np.array([2, 0, 1]), np.array([2, 0, 1]))
    (array([2, 0, 0]), array([0, 0, 1]))
    """
    datasets = np.repeat(np.arange(len(sizes)), sizes)
    samples = np.concatenate([np.arange(size) for size in sizes])
    return datasets[permuted], samples[permuted]


def square_sum(numbers: npt.NDArray[np.floating[Any]]) -> tuple[int, int, int]:
    """Sum of squares in multiples of 2**-300, and the numbers of NaNs and infinities, in Python integers.

    >>> units, *others = square_sum(np.array([1.0, -1.0, 1.5], dtype=np.float32))
    >>> units / 2**300, others
    (4.25, [0, 0])
    """
    units = num_nan = num_infinite = 0
    for number in numbers.tolist():
        if abs(number) < 2.0**128:
            units += round(math.ldexp(number * number, 300))
        elif math.isnan(number):
            num_nan += 1
        else:
            num_infinite += 1
    return 0 if num_nan + num_infinite else units, num_nan, num_infinite


def sum_ranks(
    buffers: list[npt.NDArray[Any]], *, factor: float, divisor: int, owner: int | None
) -> list[npt.NDArray[Any]]:
    """Buffers of all ranks after the sum; float32 and float64 only.

    >>> sum_ranks([np.float32([1]), np.float32([2]), np.float32([4])], factor=0.5, divisor=1, owner=1)
    [array([0.5], dtype=float32), array([3.5], dtype=float32), array([2.], dtype=float32)]
    """
    products = [buffer * buffer.dtype.type(factor) for buffer in buffers]
    terms = products
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        terms = [terms[i] + terms[i + half] if i + half < len(terms) else terms[i] for i in range(half)]
    total = terms[0] / buffers[0].dtype.type(divisor)
    return [total if owner in (None, rank) else product for rank, product in enumerate(products)]


def narrow(source: npt.NDArray[Any], dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], int]:
    """`[N]` numbers in an integer type, and the number of values before the first one that does not fit.

    >>> narrow(np.array([7, 65535, 65536]), np.uint16)[1]
    2
    """
    limits = np.iinfo(np.dtype(dtype))
    fits = [limits.min <= value <= limits.max for value in source.tolist()]
    return source.astype(dtype), fits.index(False) if False in fits else len(fits)


_BITS: Final = 2**64 - 1


def _mix(bits: int) -> int:
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _BITS
    return bits ^ bits >> 31


def _permutation_key(size: int, key: int) -> int:
    return _mix(_mix(size + 0x9E3779B97F4A7C15 & _BITS) ^ key)


def permute(position: int, *, size: int, key: int) -> int:
    """Image of a position under the keyed permutation of `[0, size)`, in Python integers.

    >>> [permute(position, size=5, key=1234) for position in range(5)]
    [4, 1, 2, 0, 3]
    """
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2 if size > 1 else 0
    columns = -(-size // rows)
    rounds = next(
        count for count, limit in ((32, 2**4), (16, 2**6), (10, 2**10), (8, 2**20), (6, 2**63)) if size < limit
    )
    mixed = _permutation_key(size, key)
    while True:
        row, column = divmod(position, columns)
        for number in range(rounds):
            bits = (row if number % 2 else column) * 0x9E3779B97F4A7C15 + mixed + number * 0xBF58476D1CE4E5B9 & _BITS
            bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93 & _BITS
            if number % 2:
                column = (column + (bits * columns >> 64)) % columns
            else:
                row = (row + (bits * rows >> 64)) % rows
        position = row * columns + column
        if position < size:
            return position


def draw_phases(nodes: npt.NDArray[np.void], num_datasets: int, key: int) -> list[int]:
    """Phase of each inner node of a tree whose last node is the root, in Python integers.

    >>> leaves = [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)]
    >>> tree = np.array([*leaves, (2**62, 0, 0, 1), (2**61, 0, 2, 3)], dtype="u8, u8, u4, u4")
    >>> [phase / 2**64 for phase in draw_phases(tree, 3, 1234)]
    [0.7306665245406241, 0.5928898580149863]
    """
    reaches = {len(nodes) - 1: 0}
    for node in range(len(nodes) - 1, num_datasets - 1, -1):
        share, _, left, right = nodes[node].tolist()
        reaches[left] = 2**32 - (-reaches[node] * share >> 64)
        reaches[right] = 2**32 - (-reaches[node] * (2**64 - share) >> 64)
    bands = {
        leaf: min(2**31, (15 * 2**29 - -(-reaches[leaf] // 2)) * 2**32 // reaches[leaf])
        for leaf in range(num_datasets)
        if reaches.get(leaf)
    }
    phases = []
    for node in range(num_datasets, len(nodes)):
        _, _, left, right = nodes[node].tolist()
        bands[node] = min(bands[left], bands[right])
        word = _mix(key + 0x9E3779B97F4A7C15 * (node - num_datasets + 1) & _BITS)
        phases.append((2**31 - bands[node]) * 2**32 + (word * bands[node] >> 31))
    return phases


def interleave(nodes: npt.NDArray[np.void], root: int, position: int) -> tuple[int, int]:
    """Dataset of a draw of a stage, and number of earlier draws from that dataset, in Python integers.

    `nodes` are the nodes of one stage, laid out as in `trackbed.kernels.BlendTrees`.

    >>> leaves = [(0, 0, 0, 0), (0, 100, 0, 1)]
    >>> tree = np.array([*leaves, (2**62, 2**63, 0, 1)], dtype="u8, u8, u4, u4")
    >>> [interleave(tree, 2, position) for position in range(5)]
    [(1, 100), (0, 0), (1, 101), (1, 102), (1, 103)]
    """
    node, ordinal = root, position
    while True:
        share, phase, left, right = nodes[node].tolist()
        if share == 0:
            return node, ordinal + phase
        before, after = (share * ordinal + phase) >> 64, (share * (ordinal + 1) + phase) >> 64
        node, ordinal = (left, before) if after > before else (right, ordinal - before)


def interleave_ramp(
    trees: Sequence[tuple[npt.NDArray[np.void], int]], num_datasets: int, length: int, position: int
) -> tuple[int, int]:
    """Dataset of a sample of a ramp, and number of earlier draws from that dataset, in Python integers.

    `trees` are nodes and root of the weights before and after the ramp.
    """
    after, beyond = ((k * k + length) // (2 * length) for k in (position, position + 1))
    numbers, own = (position - after, after), int(beyond > after)
    dataset, draw = interleave(*trees[own], numbers[own])
    nodes, root = trees[1 - own]
    return dataset, draw + int(interleaving_counts(nodes, root, num_datasets, numbers[1 - own])[dataset])


def interleaving_counts(
    nodes: npt.NDArray[np.void], root: int, num_datasets: int, position: int
) -> npt.NDArray[np.int64]:
    """`[K]` number of draws from each dataset before draw `position` of a stage, in Python integers.

    >>> leaves = [(0, 0, 0, 0), (0, 100, 0, 1)]
    >>> tree = np.array([*leaves, (2**62, 2**63, 0, 1)], dtype="u8, u8, u4, u4")
    >>> interleaving_counts(tree, 2, 2, 5).tolist()
    [1, 104]
    """
    counts = [phase for _, phase, _, _ in nodes[:num_datasets].tolist()]
    waiting = [(root, position)]
    while waiting:
        node, draws = waiting.pop()
        share, phase, left, right = nodes[node].tolist()
        if share == 0:
            counts[node] += draws
        else:
            to_left = (share * draws + phase) >> 64
            waiting += [(left, to_left), (right, draws - to_left)]
    return np.array(counts, dtype=np.int64)


def epoch_sample(draw: int, *, size: int, dataset_key: int, block: int = 1, window: int = 1) -> int:
    """Sample of draw number `draw` from a dataset of `size` samples, in Python integers.

    >>> [epoch_sample(draw, size=3, dataset_key=7) for draw in range(9)]
    [0, 1, 2, 0, 2, 1, 2, 1, 0]
    """
    epoch, position = divmod(draw, size)
    key = _mix(dataset_key + 0x9E3779B97F4A7C15 * (epoch + 1) & _BITS)
    if block == 1:
        return permute(position, size=size, key=key)
    return int(permute_blocks(size, key=key, block=block, window=window)[position])


def permute_blocks(size: int, *, key: int, block: int, window: int) -> npt.NDArray[np.int64]:
    """`[size]` image of each position when blocks are permuted, and then the samples of each window of blocks.

    >>> permute_blocks(10, key=1234, block=4, window=2).tolist()
    [9, 4, 8, 7, 6, 5, 0, 2, 3, 1]
    """
    samples = np.arange(size, dtype=np.int64)
    num_blocks = -(-size // block)
    order = [permute(slot, size=num_blocks, key=key) for slot in range(num_blocks)]
    if block == 1:
        return samples[order]
    window_key = _permutation_key(num_blocks, key ^ _BITS)
    shuffled = []
    for number, first in enumerate(range(0, num_blocks, window)):
        inside = np.concatenate([samples[block * at : block * (at + 1)] for at in order[first : first + window]])
        key = window_key + number & _BITS
        shuffled += [inside[permute(at, size=len(inside), key=key)] for at in range(len(inside))]
    return np.array(shuffled, dtype=np.int64)


def count_tokens(lengths: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Number of tokens in all documents together, and in the shortest one.

    >>> count_tokens(np.array([3, 0, 5], dtype=np.int32))
    (8, 0)
    """
    return int(lengths.sum(dtype=np.int64)), int(lengths.min()) if len(lengths) else 0


def sample_index(
    lengths: npt.NDArray[np.int32],
    visits: npt.NDArray[np.int64],
    num_samples: int,
    *,
    sequence_length: int,
    extra_token: int,
) -> npt.NDArray[np.int64]:
    """`[S + 1, 2]` visit and token offset of stream token `k * sequence_length`.

    >>> lengths = np.array([1536, 700, 400, 500, 1300], dtype=np.int32)
    >>> sample_index(lengths, np.arange(5), 2, sequence_length=1024, extra_token=1).tolist()
    [[0, 0], [0, 1024], [1, 512]]
    """
    visited = lengths[visits].astype(np.int64)
    ends = np.cumsum(visited, dtype=np.int64)
    starts = np.arange(num_samples + 1, dtype=np.int64) * sequence_length
    # With the extra token a start lies inside a document; without it, it may lie at the end of the previous one.
    visit = np.searchsorted(ends, starts, side="right" if extra_token else "left")
    rows = np.empty((num_samples + 1, 2), dtype=np.int64)
    inside = visit < len(visits)
    rows[inside, 0] = visit[inside]
    rows[inside, 1] = starts[inside] - (ends - visited)[visit[inside]]
    # Without the extra token the end may lie in an empty document; with it, the end lies on a token.
    with_tokens = np.flatnonzero(visited) if extra_token else np.arange(len(visited))
    last = int(with_tokens[-1]) if len(with_tokens) else 0
    rows[~inside, 0] = last
    rows[~inside, 1] = max(int(visited[last]) - extra_token, 0) if len(visited) else 0
    rows[0] = 0
    return rows


def pair_lengths(
    documents: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], num_epochs: int
) -> npt.NDArray[np.uint64]:
    """Documents in the lower 32 bits, their lengths in the upper ones, once per epoch.

    >>> pair_lengths(np.array([7], dtype=np.int32), np.array([1], dtype=np.int32), 2).tolist()
    [4294967303, 4294967303]
    """
    halves = np.stack([documents, lengths], axis=-1).astype("<i4")
    return np.tile(halves.view("<u8")[:, 0], num_epochs)


def cut_pairs(
    pairs: npt.NDArray[np.uint64], num_samples: int, *, sequence_length: int, extra_token: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The document of each pair, and the rows of `sample_index`.

    >>> visits, rows = cut_pairs(np.array([4 << 32 | 7], dtype=np.uint64), 1, sequence_length=3, extra_token=1)
    >>> visits.tolist(), rows.tolist()
    ([7], [[0, 0], [0, 3]])
    """
    halves = pairs.astype("<u8").view("<i4").reshape(-1, 2)
    every = np.arange(len(pairs), dtype=np.int64)
    shape = {"sequence_length": sequence_length, "extra_token": extra_token}
    return halves[:, 0], sample_index(halves[:, 1], every, num_samples, **shape)


def small_indices(
    dataset: SmallDataset, lengths: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Visits, rows and order of one dataset, computed by the other references from one stream of random numbers.

    >>> dataset = SmallDataset(1, 3, 1, 1, -1, sequence_length=8, extra_token=1, seed=1234)
    >>> [found.tolist() for found in small_indices(dataset, np.array([4, 4, 4], dtype=np.int32))]
    [[1, 2, 3], [[0, 0], [2, 0]], [0]]
    """
    generator = np.random.RandomState(dataset.seed)
    visits = np.tile(np.arange(dataset.num_documents), dataset.num_epochs)
    order = np.arange(dataset.num_samples)
    is_apart = dataset.samples_before_last >= 0
    borders = len(visits) - dataset.num_documents, dataset.samples_before_last
    for array, border in zip((visits, order), borders if is_apart else (0, 0), strict=True):
        legacy_shuffle(generator, array[:border])
        legacy_shuffle(generator, array[border:])
    shape = {"sequence_length": dataset.sequence_length, "extra_token": dataset.extra_token}
    return dataset.first + visits, sample_index(lengths, visits, dataset.num_samples, **shape), order


_TOKEN_TYPES: Final = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def gather_sample(
    sources: SampleSources, dataset: int, position: int, shape: SampleShape
) -> dict[str, npt.NDArray[Any]]:
    """One sample as arrays by key, `[S]`, `[S, S]` and `[S + 1]`; all files must be mapped and undamaged."""
    pieces = _visited(sources, dataset, position, shape) if dataset in sources.visits else None
    pieces = _stretch(sources, dataset, position, shape) if pieces is None else pieces
    text = np.concatenate(pieces).astype(np.int64)[: shape.length + shape.extra]
    ends = np.cumsum([len(piece) for piece in pieces])
    is_inner = (ends > 0) & (ends < min(shape.length, len(text)))
    inner = np.unique(ends[is_inner])
    if shape.keeps_documents_apart and dataset in sources.visits:
        is_alone = bool(shape.extra) and len(pieces[-1]) == 1
        of_pieces = np.minimum(ends, shape.length)[: max(len(ends) - 1 - is_alone, 0)]
        inner = of_pieces if len(of_pieces) < shape.length else inner
    text = np.append(text, np.full(shape.length + 1 - len(text), shape.pad))
    tokens, labels = text[:-1], text[1:]
    starts = np.flatnonzero(np.append(True, tokens[:-1] == shape.eod))
    place = np.arange(shape.length)
    number = np.searchsorted(starts, place, side="right")
    borders = np.append(0, inner)
    borders = np.append(borders, np.full(shape.length + 1 - len(borders), shape.length))
    in_documents = place - borders[np.searchsorted(borders, place, side="right") - 1]
    return {
        "tokens": np.where(tokens == shape.pad, 0, tokens),
        "labels": np.where(labels == shape.pad, 0, labels),
        "loss_mask": (labels != shape.pad)
        & ~(shape.masks_eod & (tokens == shape.eod))
        & ~(shape.masks_borders & np.isin(place + 1, ends)),
        "position_ids": in_documents
        if shape.keeps_documents_apart
        else place - starts[number - 1]
        if shape.resets_positions
        else place,
        "attention_mask": (number[:, None] != number) | (place[:, None] < place),
        "cu_seqlens": borders,
        "max_seqlen": np.diff(borders).max(),
    }


def _sequences(sources: SampleSources, dataset: int) -> list[npt.NDArray[Any]]:
    """Tokens of every sequence of a dataset's files."""
    source = sources.source_table[dataset]
    files = sources.files[source["first_file"] : source["first_file"] + source["num_files"]]
    dtype = np.dtype(_TOKEN_TYPES[int(source["dtype"])])
    return [
        tokens[pointer : pointer + length * dtype.itemsize].view(dtype)
        for tokens, lengths, pointers in filter(None, files)
        for pointer, length in zip(pointers.tolist(), lengths.tolist(), strict=True)
    ]


def _visited(sources: SampleSources, dataset: int, position: int, shape: SampleShape) -> list[npt.NDArray[Any]]:
    visits, row = sources.visits[dataset], int(sources.visits[dataset].shuffle[position])
    (first, begin), (last, end) = visits.rows[row : row + 2].tolist()
    sequences = _sequences(sources, dataset)
    pieces = [sequences[document] for document in visits.documents[first : last + 1].tolist()]
    pieces[-1] = pieces[-1][: end + shape.extra]
    pieces[0] = pieces[0][begin:]
    return pieces


def _stretch(sources: SampleSources, dataset: int, sample: int, shape: SampleShape) -> list[npt.NDArray[Any]]:
    sequences = _sequences(sources, dataset)
    source = sources.source_table[dataset]
    skipped = int(source["origin_byte"]) // np.dtype(_TOKEN_TYPES[int(source["dtype"])]).itemsize
    start = skipped + sample * shape.length
    pieces = []
    for sequence in sequences:
        pieces.append(sequence[max(start, 0) :] if start < len(sequence) else sequence[:0])
        start -= len(sequence)
    return pieces


def best_fit_decreasing(lengths: Sequence[int], capacity: int, most_items: int | None = None) -> list[list[int]]:
    """Packs items one by one: the longest first, each into the pack with the least room in which it fits.

    Of packs with equal room it is the one that has had it for longest.

    >>> best_fit_decreasing([3, 8, 2, 1, 5], 8)
    [[8], [5, 3], [2, 1]]
    >>> best_fit_decreasing([15, 15, 15, 13, 4, 2, 1], 33)
    [[15, 15, 2], [15, 13, 4, 1]]
    """
    packs: list[list[int]] = []
    changed: list[int] = []  # for each pack the number of the item that came last
    for number, length in enumerate(sorted(lengths, reverse=True)):
        fitting = [
            (capacity - sum(pack), changed[at], at)
            for at, pack in enumerate(packs)
            if capacity - sum(pack) >= length and (most_items is None or len(pack) < most_items)
        ]
        if fitting:
            *_, at = min(fitting)
            packs[at].append(length)
            changed[at] = number
        else:
            packs.append([length])
            changed.append(number)
    return packs


def deal_packs(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Packs of each rank, one of each turn: of `num_ranks` neighbours the heaviest for the rank with the least so far.

    >>> deal_packs([1, 9, 4, 7], 2)
    [[1, 0], [3, 2]]
    """
    order = sorted(range(len(costs)), key=lambda number: (-costs[number], number))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for first in range(0, len(order), num_ranks):
        least = sorted(range(num_ranks), key=lambda rank: (sum(costs[number] for number in ranks[rank]), rank))
        for rank, number in zip(least, order[first : first + num_ranks], strict=True):
            ranks[rank].append(number)
    return ranks


def pieces_of_document(num_tokens: int, sequence_length: int, long_documents: str) -> list[tuple[int, int]]:
    """First input of each piece of a document, and one after the last one.

    >>> [pieces_of_document(20, 8, long) for long in ("split", "cut", "drop")]
    [[(0, 8), (8, 16), (16, 19)], [(0, 8)], []]
    """
    places = num_tokens - 1
    starts = range(0, places, sequence_length)
    pieces = [(start, min(start + sequence_length, places)) for start in starts]
    return pieces if places <= sequence_length or long_documents == "split" else pieces[: long_documents == "cut"]
