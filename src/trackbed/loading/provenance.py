"""Provenance of samples: the documents from which their tokens come."""

from dataclasses import dataclass

from trackbed.datasets import BlendedDataset, GPTDataset, Piece
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedGroup


@dataclass(frozen=True, slots=True)
class Origin:
    """Range of tokens of one document that a sample contains."""

    prefix: str
    """Prefix of the pair that contains the document; for a group, of the member."""
    document: int
    """Number of the document in that pair; number of the sequence where documents have several."""
    start: int
    """First token of the range."""
    stop: int
    """Token after the last one of the range."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a sample."""

    position: int
    """Position of the sample in the queried dataset, at least 0."""
    dataset: int | None
    """Number of the dataset in the blend; None if the queried dataset is not a blend."""
    prefix: str
    """Prefix of the dataset, or name of its group."""
    sample: int
    """Number of the sample in the dataset's files for a blend in the order "instant", else its position in the
    dataset."""
    origins: tuple[Origin, ...]
    """Token ranges that make up the sample, in order, including the extra token but not padding."""


def provenance(dataset: GPTDataset | BlendedDataset, position: int) -> Provenance:
    """Finds the documents of a sample, and its range of tokens in each.

    Args:
        dataset: a GPT dataset, or a blend of them.
        position: position of the sample, as in `dataset[position]`; a negative one counts from the end. In Megatron's
            sequential order this is the number of samples that all ranks together have trained on before it.

    Raises:
        IndexError: there is no such sample.
        ArgumentError: `dataset` is neither a GPT dataset nor a blend of them.
    """
    number: int | None = None
    if -len(dataset) <= position < 0:
        position += len(dataset)
    sample = position
    member: object = dataset
    if isinstance(dataset, BlendedDataset):
        number, sample = dataset.locate(position)
        member = dataset.datasets[number]
    if not isinstance(member, GPTDataset):
        raise ArgumentError(f"dataset must be a GPTDataset or a blend of them, found a {type(member).__name__}")
    origins = tuple(_origin(member, piece) for piece in member.pieces(sample))
    return Provenance(position, number, str(member.dataset_path), int(sample), origins)


def _origin(dataset: GPTDataset, piece: Piece) -> Origin:
    if not isinstance(dataset.dataset, IndexedGroup):
        return Origin(str(dataset.dataset_path), *piece)
    pair, document = dataset.dataset.find(piece.document)
    return Origin(dataset.dataset.members[pair].path_prefix, document, piece.start, piece.stop)
