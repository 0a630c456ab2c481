"""Measurements against megatron-core."""
