"""Compares samples of Megatron-LM's GPTFIMDataset (core_v0.16.1) on Trackbed's base class and on Megatron Core's.

    python tests/conformance/megatron_lm/compare_fim.py /path/to/Megatron-LM

The class is the checkout's own; it draws random numbers in the order in which samples are read.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

NUM_SAMPLES = 200
EOD, VOCAB = 100, 107
SPECIAL = {"prefix": 101, "middle": 102, "suffix": 103, "pad": 104, "eod": EOD}


class Words:
    """Text of words, one for each id, and back."""

    def tokens_to_ids(self, tokens):
        return [SPECIAL[token] for token in tokens]

    def ids_to_text(self, ids):
        return "".join(chr(int(number)) for number in ids)

    def text_to_ids(self, text):
        return [ord(letter) for letter in text]


def digests(program: str, checkout: Path, folder: Path) -> list[str]:
    """Digests of the samples of one program."""
    if program == "trackbed":
        import trackbed.megatron

        trackbed.megatron.install(parts=("datasets",))
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    path = checkout / "megatron/training/datasets/fim_dataset.py"
    spec = importlib.util.spec_from_file_location("fim_dataset", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fim_dataset"] = module
    spec.loader.exec_module(module)
    tokenizer = SimpleNamespace(
        _tokenizer=Words(), vocab_size=VOCAB, eod=EOD, pad=-1, unique_identifiers={"class": "Words"}
    )
    config = module.GPTFIMDatasetConfig(
        random_seed=3,
        sequence_length=64,
        blend=([str(folder / "pair")], None),
        split="1",
        path_to_cache=str(folder / program),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        fim_rate=0.7,
        fim_spm_rate=0.5,
        fim_extra_tokens={name: name for name in SPECIAL},
    )
    sizes = [NUM_SAMPLES, None, None]
    dataset = BlendedMegatronDatasetBuilder(module.GPTFIMDataset, sizes, lambda: True, config).build()[0]
    samples = [dataset[position] for position in range(NUM_SAMPLES)]
    return [hashlib.sha256(b"".join(value.numpy().tobytes() for value in one.values())).hexdigest() for one in samples]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares samples of GPTFIMDataset on two base classes.")
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM (core_v0.16.1)")
    parser.add_argument("--program", choices=("trackbed", "megatron"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        print(json.dumps(digests(options.program, options.checkout, options.folder)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder))
        command = [sys.executable, "-W", "ignore", __file__, str(options.checkout), "--folder", folder, "--program"]
        found = {
            program: json.loads(subprocess.check_output([*command, program], env={**os.environ}).splitlines()[-1])
            for program in ("trackbed", "megatron")
        }
    same = sum(one == other for one, other in zip(*found.values(), strict=True))
    print(f"{same} of {NUM_SAMPLES} samples are identical")
    return int(same != NUM_SAMPLES)


def write_pair(folder: Path) -> None:
    """Documents of letters, each ended by the end-of-document token."""
    from trackbed.tokens import IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(folder / "pair.bin"), np.uint16)
    for length in rng.integers(1, 150, 300):
        builder.add_document(np.append(rng.integers(32, 100, length), EOD), [length + 1])
    builder.finalize(str(folder / "pair.idx"))


if __name__ == "__main__":
    sys.exit(main())
