"""Datasets of other people's classes, under the builder of Trackbed or of Megatron Core, on one rank.

    other_classes_rank.py trackbed|megatron FOLDER CASES

FOLDER has the pairs `a` and `b`. CASES is JSON: a list of dictionaries with the name of a class, of a folder for the
cache, and of the blend; `raises` is a rank whose constructor raises, `refuses` one that wants no datasets. Writes a
line of JSON for each: the digests of the samples of each split, or the error.
"""

import hashlib
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

PROGRAM, FOLDER = sys.argv[1], Path(sys.argv[2])
warnings.simplefilter("ignore")
if PROGRAM == "trackbed":
    import trackbed.megatron

    trackbed.megatron.install(parts=("datasets",))

from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.core.datasets.megatron_dataset import MegatronDataset  # noqa: E402

RAISES = [-1]


class Tokenizer:
    """Has the ids that Megatron Core's datasets ask for."""

    vocab_size, eod, pad, cls, sep, mask, bos, eos = 107, 100, 101, 102, 103, 104, 105, 100

    def __init__(self):
        self.vocab = {f"word{number}": number for number in range(self.vocab_size)}
        self.inv_vocab = {number: word for word, number in self.vocab.items()}
        self.unique_identifiers = {"class": "Tokenizer"}


class OnRankZero:
    """Builds a file on rank 0 when it is constructed, and reads it on the others: Megatron Core's convention."""

    def read_order(self, count):
        folder = Path(self.config.path_to_cache)
        path = folder / f"{self.unique_description_hash}-{self.index_split.name}-own.npy"
        if dist.get_rank() == RAISES[0]:
            raise KeyError("lost")
        if dist.get_rank() == 0 and not path.exists():
            time.sleep(0.2)
            folder.mkdir(parents=True, exist_ok=True)
            np.save(path, np.random.default_rng(count).permutation(count))
        return np.load(path)


class Sequences(OnRankZero, MegatronDataset):
    """Sequences of a file, in an order of its own."""

    def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config):
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.order = self.read_order(num_samples or len(indices))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset):
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return IndexedDataset(dataset_path)

    def __len__(self):
        return len(self.order)

    def __getitem__(self, idx):
        return {"tokens": self.dataset[int(self.indices[self.order[idx] % len(self.indices)])]}


class Shifted(OnRankZero, GPTDataset):
    """A GPT dataset that reads its indices in the constructor."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        first = int(self.shuffle_index[0])
        self.order = self.read_order(len(self.shuffle_index)) + 0 * first

    def __getitem__(self, idx):
        return super().__getitem__(None if idx is None else int(self.order[idx % len(self.order)]))


class Reversed(GPTDataset):
    """A GPT dataset with its samples in another order."""

    def _build_document_sample_shuffle_indices(self):
        documents, rows, shuffle = super()._build_document_sample_shuffle_indices()
        return documents, rows, np.ascontiguousarray(shuffle[::-1])


CLASSES = {cls.__name__: cls for cls in (Sequences, Shifted, Reversed, BERTMaskedWordPieceDataset)}


def config_of(cls, case):
    blend = [str(FOLDER / name) for name in case["blend"]]
    weights = [float(number + 1) for number in range(len(blend))] if case.get("weights") else None
    options = {
        "random_seed": 5,
        "sequence_length": 32,
        "blend": (blend, weights),
        "split": "8,1,1",
        "path_to_cache": str(FOLDER / case["cache"]),
        "tokenizer": Tokenizer(),
    }
    if cls is BERTMaskedWordPieceDataset:
        return BERTMaskedWordPieceDatasetConfig(
            **options,
            masking_probability=0.15,
            short_sequence_probability=0.1,
            masking_max_ngram=3,
            masking_do_full_word=True,
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=False,
            classification_head=True,
        )
    return GPTDatasetConfig(**options, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False)


def digest(dataset):
    """Number of samples, and a digest of some of them."""
    if dataset is None:
        return None
    found = hashlib.sha256()
    for position in range(0, len(dataset), max(1, len(dataset) // 20)):
        for name, value in dataset[position].items():
            array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
            found.update(f"{name} {array.shape}".encode() + np.ascontiguousarray(array).astype(np.int64).tobytes())
    return [len(dataset), found.hexdigest()]


def build_generic(case):
    """Builds a file on rank 0, which the others read; or, without synchronisation, calls it on the last rank alone."""
    rank, path = dist.get_rank(), FOLDER / case["cache"]

    def make(text):
        if rank == case.get("raises"):
            raise KeyError("lost")
        if rank == 0:
            time.sleep(0.2)
            path.write_text(text)
        return path.read_text() if case["synchronize"] else text

    if not case["synchronize"] and rank < dist.get_world_size() - 1:
        return None
    arguments = make, lambda: rank != case.get("refuses"), case["synchronize"], "made"
    return BlendedMegatronDatasetBuilder.build_generic_dataset(*arguments)


def answer_generic(case):
    began = time.monotonic()
    try:
        return {"made": build_generic(case)}
    except Exception as error:  # reported
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}


def answer(case):
    if case["class"] == "generic":
        return answer_generic(case)
    cls = CLASSES[case["class"]]
    RAISES[0] = case.get("raises", -1)
    wants = dist.get_rank() != case.get("refuses", -1)
    began = time.monotonic()
    try:
        datasets = BlendedMegatronDatasetBuilder(cls, case["sizes"], lambda: wants, config_of(cls, case)).build()
    except Exception as error:  # reported
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    return {"datasets": [digest(dataset) for dataset in datasets]}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in json.loads(sys.argv[3]):
        print(json.dumps(answer(case)), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
