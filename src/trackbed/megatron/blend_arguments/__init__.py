"""Blend files from the arguments of a Megatron-LM job."""
