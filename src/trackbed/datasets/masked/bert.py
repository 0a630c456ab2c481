"""Datasets of BERT: two segments of sentences, some of whose words are masked.

Shapes: S tokens of a sample.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from trackbed.datasets.masked.config import MaskedWordPieceDatasetConfig, as_flag
from trackbed.datasets.masked.dataset import MaskedWordPieceDataset
from trackbed.datasets.megatron_dataset import LowLevelDataset
from trackbed.datasets.megatron_releases import default_vocabulary_order
from trackbed.errors import ArgumentError
from trackbed.index.splits import Split
from trackbed.kernels import MaskingTable

_SPECIAL_TOKENS: Final = 3
"""One `cls` and two `sep`."""
_ORDERS: Final = ("listed", "sorted")
_NO_LABEL: Final = -1


@dataclass
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Configuration with the fields, their order and the defaults of megatron-core 0.16.1, then Trackbed's keywords.

    Raises:
        ArgumentError: fields that are missing, contradict each other or are out of range.
    """

    classification_head: bool | None = None
    """True to swap the segments of half of the samples, for the prediction of the next sentence; required."""

    bert_vocabulary_order: Literal["listed", "sorted"] = field(default_factory=default_vocabulary_order, kw_only=True)
    """Order of the ids from which a random token is drawn. "listed": the order of the tokenizer's `inv_vocab`, as in
    megatron-core 0.16.1. "sorted": increasing ids, as in 0.18 and later. By default "listed", unless
    `trackbed.megatron.install()` has found a later release."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        if self.classification_head is None:
            raise ArgumentError("classification_head must be given, found None")
        self.classification_head = bool(as_flag("classification_head", self.classification_head))
        if self.bert_vocabulary_order not in _ORDERS:
            choices = " or ".join(map(repr, _ORDERS))
            raise ArgumentError(f"bert_vocabulary_order must be {choices}, found {self.bert_vocabulary_order!r}")
        self.check_length(special_tokens=_SPECIAL_TOKENS)


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples of BERT: `cls`, a segment of sentences and `sep`, then another segment and `sep` if there is one.

    Of the masked tokens, 80 % become `mask`, 10 % a random token, and 10 % stay as they are. See
    `MaskedWordPieceDataset` for arguments and errors.
    """

    config: BERTMaskedWordPieceDatasetConfig

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: npt.NDArray[np.integer[Any]] | None,
        num_samples: int | None,
        index_split: Split,
        config: BERTMaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        listed = self._pieces.listed
        self.token_lookup = sorted(listed) if config.bert_vocabulary_order == "sorted" else list(listed)
        self._request_index(config.sequence_length - _SPECIAL_TOKENS, 2 if config.classification_head else 1)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Returns the names of the configuration fields that belong to the dataset's identity."""
        return [*MaskedWordPieceDataset._key_config_attributes(), "classification_head"]

    def _shaping(self) -> dict[str, Any]:
        return {"bert_vocabulary_order": self.config.bert_vocabulary_order}

    def _agreed_besides(self) -> dict[str, Any]:
        return {**super()._agreed_besides(), **self._shaping()}

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Returns one sample.

        Args:
            idx: position, in `[-R, R)`.

        Returns:
            `text`, `types`, `labels`, `padding_mask` and `loss_mask`, each `[S]` int64; `is_random`, 1 if the segments
            are swapped; and `truncated`, 1 if the sentences are longer than the sample.

        Raises:
            IndexError: `idx` is out of range.
            CacheError: the index is damaged.
            FormatError: the files are shorter than their index says, or a token is not in the vocabulary.
        """
        return self._from_kernel(idx) or self._make_sample(idx)

    def _make_sample(self, idx: int) -> dict[str, Any]:
        """Returns the sample at a position, made in Python."""
        sentences, target, random = self._read(idx)
        first, second, is_swapped = self._segments(sentences, random)
        is_truncated = len(first) + len(second) > target
        while len(first) + len(second) > target:
            longer = first if len(first) > len(second) else second
            del longer[0 if random.random() < 0.5 else -1]
        cls, sep = self._pieces.cls, self._pieces.sep
        tokens, types = [cls, *first, sep], [0] * (len(first) + 2)
        if second:
            tokens += [*second, sep]
            types += [1] * (len(second) + 1)
        if len(tokens) > self.config.sequence_length:
            wanted = f"a length of at most {self.config.sequence_length - _SPECIAL_TOKENS}"
            raise self._damage(wanted, f"{target} in row {idx}")
        tokens, positions, labels, _, _ = self._create_masked_lm_predictions(tokens, target, random)

        length, pad = self.config.sequence_length, self._pad_token_id
        text, segments = np.full(length, pad, dtype=np.int64), np.full(length, pad, dtype=np.int64)
        text[: len(tokens)], segments[: len(types)] = tokens, types
        padding_mask = np.where(text == pad, pad, 1)
        label = np.full(length, _NO_LABEL, dtype=np.int64)
        label[positions] = labels
        loss_mask = np.zeros(length, dtype=np.int64)
        loss_mask[positions] = 1
        for ids in (text, label):
            ids[ids == pad] = 0  # a valid id for the embedding lookup; the masks are computed already
        return {
            "text": text,
            "types": segments,
            "labels": label,
            "is_random": int(is_swapped),
            "padding_mask": padding_mask,
            "loss_mask": loss_mask,
            "truncated": int(is_truncated),
        }

    @property
    def token_lookup(self) -> list[int]:
        """Ids from which a random token is drawn; a list that replaces it is used from the next sample on."""
        return self._token_lookup

    @token_lookup.setter
    def token_lookup(self, ids: list[int]) -> None:
        self._token_lookup = ids
        vars(self).pop("_cached_batch_reader", None)

    def _table(self) -> MaskingTable:
        return MaskingTable(
            is_t5=False,
            has_segments=bool(self.config.classification_head),
            listed=np.array(self.token_lookup, dtype=np.int64),
            **self._common_table(),
        )

    def _lengths(self) -> tuple[tuple[str, int | None], ...]:
        numbers = ("is_random", "truncated")
        names = ("text", "types", "labels", "is_random", "padding_mask", "loss_mask", "truncated")
        return tuple((name, None if name in numbers else self.config.sequence_length) for name in names)

    def _segments(self, sentences: list[list[int]], random: np.random.RandomState) -> tuple[list[int], list[int], bool]:
        """Returns the tokens of both segments, and whether they are swapped."""
        pivot, is_swapped = len(sentences), False
        if self.config.classification_head:
            if len(sentences) < 2:
                wanted = "samples of at least 2 sentences"
                raise self._damage(wanted, f"{len(sentences)}")
            pivot = random.randint(1, len(sentences)) if len(sentences) > 2 else 1
            is_swapped = random.random() < 0.5
        first = list(chain.from_iterable(sentences[:pivot]))
        second = list(chain.from_iterable(sentences[pivot:]))
        return (second, first, True) if is_swapped else (first, second, False)

    def _get_token_mask(self, numpy_random_state: np.random.RandomState) -> int | None:
        """Returns `mask`, a random token, or None to leave the token as it is. Subclasses may override it."""
        if numpy_random_state.random() < 0.8:
            return self._pieces.mask
        if numpy_random_state.random() < 0.5:
            return None
        return self.token_lookup[numpy_random_state.randint(0, len(self.token_lookup))]
