"""Megatron Core as the oracle, and the cases that are compared with it."""
