"""Megatron Core is the oracle here. Importing it warns, in its own modules and in torch's, and nowhere else."""

import warnings

# A plugin for Megatron-LM's own tests, which puts Trackbed in the oracle's place.
collect_ignore = ["megatron_lm"]

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    import megatron.core.datasets.helpers
    import megatron.core.datasets.indexed_dataset  # noqa: F401
