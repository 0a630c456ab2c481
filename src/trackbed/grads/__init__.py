"""Buffers of parameters and gradients, and the communication of gradients between data-parallel ranks."""

from trackbed.grads.layout import Layout, ParameterPieces, ParameterSpec, plan_layout

__all__ = ["Layout", "ParameterPieces", "ParameterSpec", "plan_layout"]
