"""Megatron Core is the oracle here. Importing it warns, in its own modules and in torch's, and nowhere else."""

import warnings

# A plugin for Megatron-LM's own tests, which puts Trackbed in the oracle's place.
collect_ignore = ["megatron_lm"]

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    import megatron.core.datasets.helpers
    import megatron.core.datasets.indexed_dataset  # noqa: F401


def pytest_terminal_summary(terminalreporter):
    """How many generated configurations were identical, and how many somebody refused."""
    for report in terminalreporter.stats.get("passed", []):
        for name, counts in report.user_properties:
            if name.startswith("conformance"):
                terminalreporter.write_line(
                    f"{name}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
                )
