"""Trackbed's kernels and builder under Megatron Core's own datasets, whose classes stay as they are."""
