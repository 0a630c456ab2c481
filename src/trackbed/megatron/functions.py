"""Megatron Core's module-level functions: on indices, over Trackbed's kernels, and on object stores, over its client.

Shapes: K datasets, N samples, D documents, V visits, R samples.
"""

import logging
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.comm.torch_group import current_group
from trackbed.errors import ArgumentError
from trackbed.files import new_partial, publish, stores
from trackbed.files.stores import parse_address
from trackbed.index.epochs import samples_in
from trackbed.index.samples import sample_index_dtype
from trackbed.tokens import ObjectStorageConfig, SequenceIndex
from trackbed.tokens import open_index as open_index_file
from trackbed.tokens.stored.index_cache import StoredIndex
from trackbed.tokens.stored.open_pairs import stored_pair_exists

Rows = npt.NDArray[np.integer[Any]]


def build_blending_indices(
    dataset_index: npt.NDArray[np.int16],
    dataset_sample_index: npt.NDArray[np.int64],
    weights: Any,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fills the first `size` elements of both outputs greedily; see `trackbed.index.greedy_blend`."""
    shares = np.asarray(weights, dtype=np.float64)
    _check_counts("weights", len(shares), num_datasets)
    _check_room(len(dataset_index), len(dataset_sample_index), size)
    kernels.greedy_blend(shares[:num_datasets], dataset_index[:size], dataset_sample_index[:size])


def build_exhaustive_blending_indices(
    dataset_index: npt.NDArray[np.int16],
    dataset_sample_index: npt.NDArray[np.int64],
    sizes: Any,
    num_datasets: int,
) -> None:
    """Fills both outputs with every sample once; see `trackbed.index.exhaustive_blend`."""
    counts = np.asarray(sizes, dtype=np.int64)
    _check_counts("sizes", len(counts), num_datasets)
    kernels.exhaustive_blend(counts[:num_datasets], dataset_index, dataset_sample_index)


def build_mapping(
    documents: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    verbose: bool,
    min_num_sent: int,
) -> Rows:
    """`[R, 3]` samples of whole sentences, shuffled; see `trackbed.kernels.build_mapping`."""
    return kernels.build_mapping(
        np.asarray(documents),
        np.asarray(sizes),
        num_samples=max_num_samples,
        max_length=max_seq_length,
        short_probability=short_seq_prob,
        seed=seed,
        min_sentences=min_num_sent,
        num_epochs=num_epochs,
    )


def build_sample_idx(
    sizes: npt.NDArray[np.int32],
    document_indices: npt.NDArray[np.int32],
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> Rows:
    """`[R + 1, 2]` rows of the sample index, int32 where they fit; see `trackbed.index.sample_index`."""
    dtype = sample_index_dtype(len(document_indices), int(sizes.max()) if len(sizes) else 0)
    tokens = num_epochs * tokens_per_epoch - int(add_extra_token_to_sequence)
    num_samples = samples_in(tokens, sequence_length, keep_partial=not drop_last_partial_sequence)
    rows = np.empty((num_samples + 1, 2), dtype=dtype)
    kernels.sample_index(
        sizes,
        document_indices,
        rows,
        sequence_length=sequence_length,
        extra_token=int(add_extra_token_to_sequence),
    )
    return rows


def build_sample_idx_int32(*args: Any) -> npt.NDArray[np.int32]:
    """`build_sample_idx`, in int32."""
    return build_sample_idx(*args).astype(np.int32, copy=False)


def build_sample_idx_int64(*args: Any) -> npt.NDArray[np.int64]:
    """`build_sample_idx`, in int64."""
    return build_sample_idx(*args).astype(np.int64, copy=False)


def compile_helpers() -> None:
    """Does nothing: the kernels were compiled when Trackbed was installed."""


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Calls `logger.log(*args, **kwargs)` on one rank of `torch.distributed` only."""
    group = current_group()
    if group is None or group.rank == rank:
        logger.log(*args, **kwargs)


def open_index(
    idx_path: str,
    multimodal: bool,
    sequences_per_dataset: tuple[int, int] | None = None,
    dtype_code: int | None = None,
) -> SequenceIndex:
    """Opens the index file at a path.

    Raises:
        FormatError: the file is damaged.
        ArgumentError: its counts differ from `sequences_per_dataset`.
    """
    index = open_index_file(Path(idx_path), multimodal=multimodal)
    found = (index.sequence_count, index.document_count)
    if sequences_per_dataset is not None and found != tuple(sequences_per_dataset):
        raise ArgumentError(
            f"{idx_path}: must have {sequences_per_dataset} sequences and document borders, found {found}"
        )
    return index


def _check_counts(name: str, found: int, num_datasets: int) -> None:
    if found < num_datasets:
        raise ArgumentError(f"{name} must have num_datasets = {num_datasets} entries, found {found}")


def _check_room(datasets: int, samples: int, size: int) -> None:
    if not 0 <= size <= min(datasets, samples):
        raise ArgumentError(f"size must be in [0, {min(datasets, samples)}], the length of the outputs, found {size}")


_S3, _MSC = "s3://", "msc://"


class S3Client(Protocol):
    """Methods of boto3's S3 client that Megatron Core calls. Trackbed has a client of its own."""

    def download_file(self, Bucket: str, Key: str, Filename: str) -> None:  # noqa: N803  boto3's names
        """Downloads an object to a file."""

    def upload_file(self, Filename: str, Bucket: str, Key: str) -> None:  # noqa: N803
        """Uploads a file."""

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        """Returns the metadata of an object."""

    def get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, Any]:  # noqa: N803
        """Returns an object, or a part of it."""

    def close(self) -> None:
        """Closes the client."""


def is_s3_path(path: str) -> bool:
    """True for an address with the scheme `s3`."""
    return path.startswith(_S3)


def is_object_storage_path(path: str) -> bool:
    """True for an address with the scheme `s3` or `msc`, as in Megatron Core; Trackbed reads others, too."""
    return path.startswith((_S3, _MSC))


def get_object_storage_access(path: str) -> str:
    """Returns "s3" for an address with that scheme, else "msc"."""
    return "s3" if is_s3_path(path) else "msc"


def get_index_cache_path(idx_path: str, object_storage_config: ObjectStorageConfig) -> str:
    """Returns the path where Megatron Core keeps its copy of an `.idx`. Trackbed's lie elsewhere in the folder."""
    _check_address(idx_path)
    return os.path.join(object_storage_config.path_to_idx_cache, idx_path.partition("://")[2])  # noqa: PTH118  as text


def parse_s3_path(path: str) -> tuple[str, str]:
    """Returns bucket and key of an address."""
    if not is_s3_path(path):
        raise ArgumentError(f"{path}: an address must begin with {_S3}, found another")
    bucket, _, key = path.removeprefix(_S3).partition("/")
    return bucket, key


def dataset_exists(path_prefix: str, idx_path: str, bin_path: str) -> bool:
    """True if both objects of a pair exist."""
    _check_address(path_prefix)
    return stored_pair_exists(path_prefix)


def cache_index_file(remote_path: str, local_path: str) -> None:
    """Copies an `.idx` object to a file, which appears whole. It is fetched once per host, not on rank 0 only.

    Args:
        remote_path: address of the object.
        local_path: path of the file.
    """
    _check_address(remote_path)
    address, final = parse_address(remote_path), Path(local_path)
    final.parent.mkdir(parents=True, exist_ok=True)
    copied = StoredIndex(address, str(final.parent)).fetch(stores.stamp_of_object(address))
    partial = new_partial(final)
    try:
        os.link(copied, partial)
        publish(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def _check_address(path: str) -> None:
    if not is_object_storage_path(path):
        raise ArgumentError(f"{path}: an address must begin with {_S3} or {_MSC}, found another")
