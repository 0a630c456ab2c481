"""A small BERT and a small T5, from raw text to 200 steps each, on text that every machine with Python has.

    python examples/train_masked.py --output masked-out

Trains a WordPiece vocabulary, writes the sentences of every document to indexed files, builds the datasets, trains both
models on 2 threads, and prints the losses. Takes about a minute; `--output` is a new folder, or one of an earlier run.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import corpora
import tokenizers
import torch
from demo import timed
from rich.console import Console
from rich.progress import track
from torch import nn

from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
    WordPieceTokenizer,
)
from trackbed.loading import BatchStream, MegatronPretrainingSampler
from trackbed.preprocess import PreprocessConfig, open_splitter, output_prefix, preprocess

NAMES = ("topics", "papers")
STEPS, BATCH, LENGTH, DECODER_LENGTH, VOCABULARY = 200, 24, 64, 32, 2048
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
SENTINELS = [f"<extra_id_{number}>" for number in range(100)]
LEARNING_RATE, WARM_UP = 4e-3, 20
console = Console()
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a model."""

    vocabulary: int
    width: int = 128
    heads: int = 4
    layers: int = 2


Layer = TypeVar("Layer", nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def layers(kind: type[Layer], size: Size) -> list[Layer]:
    """Layers of torch's transformer."""
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    return [kind(size.width, size.heads, 4 * size.width, **options) for _ in range(size.layers)]


class Embedding(nn.Module):
    """Embeddings of tokens and positions, added; also the output layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(LENGTH, size.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[B, S]` ids to `[B, S, W]`."""
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., W]` to `[..., vocabulary]`."""
        return hidden @ self.tokens.weight.T


class Bert(nn.Module):
    """Predicts masked tokens, and whether the segments of a sample are swapped."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding, self.types = Embedding(size), nn.Embedding(2, size.width)
        self.layers = nn.ModuleList(layers(nn.TransformerEncoderLayer, size))
        self.norm, self.is_swapped = nn.LayerNorm(size.width), nn.Linear(size.width, 2)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy of the masked tokens, and of the order of the segments, in nats."""
        padding = batch["padding_mask"] != 1
        hidden = self.embedding(batch["text"]) + self.types(batch["types"].clamp(max=1))
        for one in self.layers:
            hidden = one(hidden, src_key_padding_mask=padding)
        hidden, is_masked = self.norm(hidden), batch["loss_mask"] == 1
        tokens = nn.functional.cross_entropy(self.embedding.logits(hidden[is_masked]), batch["labels"][is_masked])
        return tokens, nn.functional.cross_entropy(self.is_swapped(hidden[:, 0]), batch["is_random"])


class T5(nn.Module):
    """Predicts the masked spans, each after its sentinel."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = Embedding(size)
        self.encoder = nn.ModuleList(layers(nn.TransformerEncoderLayer, size))
        self.decoder = nn.ModuleList(layers(nn.TransformerDecoderLayer, size))
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy of the tokens that the loss mask keeps, in nats, and 0."""
        padding, tokens = batch["enc_mask"] == 0, batch["text_dec"]
        memory = self.embedding(batch["text_enc"])
        for one in self.encoder:
            memory = one(memory, src_key_padding_mask=padding)
        memory, hidden = self.norms[0](memory), self.embedding(tokens)
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for one in self.decoder:
            hidden = one(hidden, memory, tgt_mask=later, memory_key_padding_mask=padding)
        is_kept = batch["loss_mask"] == 1
        logits = self.embedding.logits(self.norms[1](hidden)[is_kept])
        return nn.functional.cross_entropy(logits, batch["labels"][is_kept]), torch.zeros(())


def texts(name: str) -> Iterator[str]:
    """The texts of a corpus."""
    yield from corpora.CORPORA[name]()


def make_vocabulary(folder: Path) -> WordPieceTokenizer:
    """A WordPiece vocabulary of the corpora, with the tokens that BERT and T5 need."""
    trainer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    every = (text for name in NAMES for text in texts(name))
    trainer.train_from_iterator(
        every, vocab_size=VOCABULARY, special_tokens=[*SPECIAL, *SENTINELS], show_progress=False
    )
    trainer.save_model(str(folder))
    return WordPieceTokenizer(folder / "vocab.txt", lower_case=True)


def make_sentences(folder: Path, tokenizer: WordPieceTokenizer) -> list[str]:
    """One pair of indexed files per corpus, with a sequence for each sentence."""
    inputs, prefixes = corpora.write(folder), []
    for name in NAMES:
        job = PreprocessConfig(inputs=(inputs[name],), output=str(folder / name))
        preprocess(job, tokenizer, splitter=open_splitter("sentencex"))
        prefixes.append(output_prefix(str(folder / name), "text", level="sentence"))
    return prefixes


def build(model: str, prefixes: list[str], folder: Path, tokenizer: WordPieceTokenizer) -> Any:
    """The training data of a model."""
    common: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": LENGTH,
        "blend": (prefixes, [0.3, 0.7]),
        "split": "98,1,1",
        "path_to_cache": str(folder / "cache"),
        "tokenizer": tokenizer,
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_max_ngram": 3,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "masking_use_geometric_distribution": False,
    }
    dataset: type[Any] = BERTMaskedWordPieceDataset
    config: Any = None
    if model == "bert":
        config = BERTMaskedWordPieceDatasetConfig(**common, classification_head=True)
    else:
        dataset = T5MaskedWordPieceDataset
        config = T5MaskedWordPieceDatasetConfig(**common, sequence_length_decoder=DECODER_LENGTH)
    return BlendedMegatronDatasetBuilder(dataset, [STEPS * BATCH, 0, 0], lambda: True, config).build()[0]


def train(name: str, data: Any, make: Callable[[Size], Bert | T5], vocabulary: int) -> tuple[float, float]:
    """Trains a model. Returns the loss of the tokens at the first step, and its mean over the last 10."""
    torch.manual_seed(1234)
    model = make(Size(vocabulary=vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    loader = BatchStream(data, MegatronPretrainingSampler(len(data), 0, BATCH, 0, 1))
    losses = []
    for batch, _ in zip(track(loader, f"training {name}", total=STEPS, console=console), range(STEPS), strict=False):
        tokens, others = model.losses(batch)
        optimizer.zero_grad()
        (tokens + others).backward()
        optimizer.step()
        warm_up.step()
        losses.append(tokens.item())
    return losses[0], sum(losses[-10:]) / 10


def main() -> int:
    """Run the example; 0 if both models have learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("masked-out"), help="folder for everything that is made")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    started = time.perf_counter()
    tokenizer = timed("a WordPiece vocabulary of 2,048 tokens trained", partial(make_vocabulary, folder))
    prefixes = timed("sentences tokenised", partial(make_sentences, folder, tokenizer))
    has_learnt = True
    for name, make in (("bert", Bert), ("t5", T5)):
        data = timed(f"data of {name} built", partial(build, name, prefixes, folder, tokenizer))
        first, last = timed(f"{STEPS} steps of {name}", partial(train, name, data, make, tokenizer.vocab_size))
        console.print(f"{name}: loss {first:.2f} at the first step, {last:.2f} over the last 10")
        has_learnt = has_learnt and last <= 0.8 * first
    console.print(f"together: [bold]{time.perf_counter() - started:.1f} s[/]")
    return 0 if has_learnt else 1


if __name__ == "__main__":
    sys.exit(main())
