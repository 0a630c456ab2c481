"""Megatron Core is the oracle here. Importing it warns, in its own modules and in torch's, and nowhere else."""

import warnings

# Both put Trackbed in the oracle's place, in a process of their own.
collect_ignore = ["megatron_lm", "other_classes_rank.py"]

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        import megatron.core.datasets.helpers
        import megatron.core.datasets.indexed_dataset  # noqa: F401
except ModuleNotFoundError:  # `tests/conftest.py` says so
    collect_ignore_glob = ["*"]
