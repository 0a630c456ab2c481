"""Checkpoints as Megatron Core's programs expect them: its functions, strategies and wrappers."""
