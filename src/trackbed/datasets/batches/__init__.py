"""Batches of samples, gathered by one kernel call."""
