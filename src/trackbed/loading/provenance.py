"""Where the tokens of a sample come from."""

from dataclasses import dataclass

from trackbed.datasets import BlendedDataset, GPTDataset, Piece
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedGroup

__all__ = ["Origin", "Provenance", "provenance"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Tokens of a sample that come from one document."""

    prefix: str
    """The pair that it stands in; of a group, the member."""
    document: int
    """Its number there: of the sequence, where documents have several."""
    start: int
    """Its first token that belongs to the sample."""
    stop: int
    """The token after the last one."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a global sample holds."""

    position: int
    """Of the sample in the dataset that was asked."""
    dataset: int | None
    """Number of the dataset in the blend; None where there is none."""
    prefix: str
    """Of the dataset, or the name of its group."""
    sample: int
    """In the order "instant" of a blend its number in the dataset's files; else its position in that dataset."""
    origins: tuple[Origin, ...]
    """One after the other; they make up the sample, the extra token included and padding not."""


def provenance(dataset: GPTDataset | BlendedDataset, position: int) -> Provenance:
    """Which documents a sample is made of, and which tokens of them.

    Args:
        dataset: a GPT dataset, or a blend of them.
        position: of the sample, as `dataset[position]` takes it: in Megatron's sequential order the number of samples
            that all ranks together have trained on before it.

    Raises:
        IndexError: there is no such sample.
        ArgumentError: the dataset is of another kind.
    """
    number: int | None = None
    sample = position
    member: object = dataset
    if isinstance(dataset, BlendedDataset):
        number, sample = dataset.locate(position)
        member = dataset.datasets[number]
    if not isinstance(member, GPTDataset):
        msg = f"dataset must be a GPTDataset or a blend of them, found a {type(member).__name__}"
        raise ArgumentError(msg)
    origins = tuple(_origin(member, piece) for piece in member.pieces(sample))
    return Provenance(position, number, str(member.dataset_path), int(sample), origins)


def _origin(dataset: GPTDataset, piece: Piece) -> Origin:
    if not isinstance(dataset.dataset, IndexedGroup):
        return Origin(str(dataset.dataset_path), *piece)
    pair, document = dataset.dataset.find(piece.document)
    return Origin(dataset.dataset.members[pair].path_prefix, document, piece.start, piece.stop)
