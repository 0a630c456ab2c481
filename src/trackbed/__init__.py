"""Tokens in, gradients across, checkpoints out: the layers under a model in LLM pre-training."""

__all__ = ["__version__"]

__version__ = "0.1.0"
