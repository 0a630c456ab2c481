"""Asks one library what it makes of a configuration, and describes the answer.

Runs in a process of its own for Megatron Core, whose environment need not have Trackbed:

    python observe.py            requests as lines of JSON on stdin, answers as lines of JSON on stdout
"""

import hashlib
import json
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np

MOST_SAMPLES = 6
MOST_MASKED_SAMPLES = 20
CLASSES = {
    "bert": ("bert_dataset", "BERTMaskedWordPieceDataset"),
    "gpt": ("gpt_dataset", "GPTDataset"),
    "t5": ("t5_dataset", "T5MaskedWordPieceDataset"),
}


def answer(request, tokenizer, root, **options):
    """What the library whose datasets are under `root` makes of a request; `options` are for its builder.

    Returns:
        A dictionary: for each split None or a description; digests of all cache files; and the ids of the request's
        texts. Or `error`.
    """
    try:
        built = build(request, tokenizer, root, **options)
        datasets = [describe(dataset, request.get("positions")) for dataset in built]
        ids = [list(map(int, tokenizer.tokenize(text))) for text in request.get("texts", [])]
    except Exception as error:  # whatever it is, it is an answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"datasets": datasets, "files": digests(Path(request["config"]["path_to_cache"])), "ids": ids}


def build(request, tokenizer, root, **options):
    """The datasets of all splits."""
    name, class_name = CLASSES[request.get("model", "gpt")]
    module = import_module(f"{root}.datasets.{name}")
    builder = import_module(f"{root}.datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    arguments = _blends_as_tuples(request["config"])
    config = getattr(module, f"{class_name}Config")(tokenizer=tokenizer, **arguments)
    return builder(getattr(module, class_name), list(request["sizes"]), lambda: True, config, **options).build()


def describe(dataset, at=None):
    """Length, indices, members and some samples of a dataset, or those `at` some positions."""
    if dataset is None:
        return None
    if isinstance(dataset, list):
        return [describe(member, at) for member in dataset]
    arrays = ("document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index")
    found = {
        "type": type(dataset).__name__,
        "length": len(dataset),
        "arrays": {name: digest(getattr(dataset, name)) for name in arrays if hasattr(dataset, name)},
        "samples": {str(position): sample(dataset, position) for position in at or positions(dataset)},
    }
    if hasattr(dataset, "datasets"):
        found["members"] = [describe(member) for member in dataset.datasets]
    return found


def positions(dataset):
    """Some positions, the first and the last among them."""
    if len(dataset) == 0:
        return []
    rng = np.random.default_rng(len(dataset))
    is_masked = "Masked" in type(getattr(dataset, "datasets", [dataset])[0]).__name__
    count = MOST_MASKED_SAMPLES if is_masked else MOST_SAMPLES
    chosen = {0, len(dataset) - 1, -1, *rng.integers(0, len(dataset), count - 2).tolist()}
    return [*sorted(chosen), *([] if is_masked or hasattr(dataset, "datasets") else [None])]


def sample(dataset, position):
    """Digests of one sample by key, in the order of its keys; or what it failed with."""
    for member in (dataset, *getattr(dataset, "datasets", ())):
        if hasattr(member, "masks_and_position_ids_are_cached"):
            # Megatron Core keeps the loss mask of the first sample with that sample's padding in it, and gives it
            # to all that follow: what a sample holds then depends on what was read before (differences.md).
            member.masks_and_position_ids_are_cached = False
    try:
        return [[key, digest(value)] for key, value in dataset[position].items()]
    except Exception as error:  # whatever it is, it is an answer
        return f"error: {type(error).__name__}"


def digest(value):
    """Type, shape and a digest of the bytes."""
    array = np.ascontiguousarray(value.numpy() if hasattr(value, "numpy") else value)
    return [str(array.dtype), list(np.shape(value)), hashlib.sha256(array.tobytes()).hexdigest()]


def digests(folder):
    """Digests of the files in a folder, by name; not of what is below it."""
    if not folder.is_dir():
        return {}
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir()) if path.is_file()
    }


def _blends_as_tuples(config):
    found = dict(config)
    if found.get("blend"):
        found["blend"] = tuple(found["blend"])
    if found.get("blend_per_split"):
        found["blend_per_split"] = [blend and tuple(blend) for blend in found["blend_per_split"]]
    return found


def word_piece_tokenizer(tokenizer):
    """The generated tokenizer of a request."""
    from tests.support.megatron_core.word_piece_tokenizer import WordPieceTokenizer

    wanted = ("seed", "size", "continues", "pad", "sentinels")
    return WordPieceTokenizer(**{name: tokenizer[name] for name in wanted})


def permute_by_the_samples_stream():
    """Have Megatron Core draw what it permutes from the sample's stream: its own is that of the whole process."""
    from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset

    original = MaskedWordPieceDataset._create_masked_lm_predictions

    def patched(self, token_ids, target_sequence_length, numpy_random_state):
        choice, np.random.choice = np.random.choice, numpy_random_state.choice
        try:
            return original(self, token_ids, target_sequence_length, numpy_random_state)
        finally:
            np.random.choice = choice

    MaskedWordPieceDataset._create_masked_lm_predictions = patched


def megatron_tokenizer(tokenizer):
    """Megatron Core's own tokenizer for a request, or a generated one."""
    if tokenizer["kind"] == "word pieces":
        return word_piece_tokenizer(tokenizer)
    try:
        from megatron.core.tokenizers import MegatronTokenizer
    except ModuleNotFoundError:  # before core 0.13
        return _legacy_tokenizer(tokenizer["vocab_size"])
    from megatron.core import tokenizers

    kind = tokenizer["kind"] if tokenizer["kind"] in ("null", "sentencepiece", "tiktoken") else "huggingface"
    if kind == "null" and hasattr(tokenizers.megatron_tokenizer, "TEXT_LIBRARIES"):  # from core 0.17 on
        kind = "null-text"
    return MegatronTokenizer.from_pretrained(
        tokenizer_path=tokenizer["identity"]["path"],
        metadata_path={"library": kind},
        **tokenizer["identity"]["options"],
    )


def _legacy_tokenizer(vocab_size):
    from megatron.core.datasets.megatron_tokenizer import MegatronTokenizer

    class NullTokenizer(MegatronTokenizer):
        def __init__(self, vocab_size):
            super().__init__(None, vocab_size=vocab_size)
            self._ids = vocab_size

        def tokenize(self, text):
            return [int(word) for word in text.split()]

        vocab = inv_vocab = property(lambda self: {})
        vocab_size = property(lambda self: self._ids + 1)
        eod = property(lambda self: self._ids)

    return NullTokenizer(vocab_size)


def main():
    """Answer requests until there are no more."""
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    import torch.distributed

    port = sys.argv[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    permute_by_the_samples_stream()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        found = answer(request, megatron_tokenizer(request["tokenizer"]), "megatron.core")
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
