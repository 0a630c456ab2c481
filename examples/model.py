"""A small GPT in plain PyTorch.

Shapes: B samples of a batch, S tokens of a sample, W width of the model.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model's size."""

    vocab_size: int
    sequence_length: int
    width: int = 192
    heads: int = 6
    layers: int = 6


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`[B, S, W]` to `[B, S, W]`; `mask` as in `GPT.forward`."""
        split = self.queries_keys_values(self.attention_norm(hidden)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None
        )
        hidden = hidden + self.attention_out(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class GPT(nn.Module):
    """A decoder whose input and output embeddings are one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[B, S]` token and position ids to `[B, S, vocabulary]` logits.

        `mask` is `[B, 1, S, S]`, True where a place may see another one; by default it may see all earlier ones.
        """
        hidden = self.tokens(tokens) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.norm(hidden) @ self.tokens.weight.T

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean cross-entropy over the labels that the loss mask keeps, in nats."""
        logits = self(batch["tokens"], batch["position_ids"])
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"].flatten()
        return (losses * mask).sum() / mask.sum()
