"""The state of a run as text for Prometheus: a file for the textfile collector of its node exporter.

Format: OpenMetrics 1.0 (https://prometheus.io/docs/specs/om/open_metrics_spec/).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trackbed.files.publish import new_partial, publish, write_new

NAME: Final = "metrics.prom"
_SECONDS: Final = 5.0
"""Least interval between two writes."""
_GAUGES: Final = {
    "step": "Last recorded step",
    "loss": "Mean loss of the last step",
    "grad_norm": "Norm of the gradients of the last step",
    "num_ranks": "Ranks that read different samples",
    "stall_seconds": "Time for which the last step has waited for batches",
    "checkpoint_seconds": "Time for which the last step has waited for saves",
    "communication_seconds": "Time for which the last step has waited for other ranks",
}


class MetricsFile:
    """Observer that keeps a file of metrics in the folder of a run, which appears whole each time.

    Args:
        folder: folder of the run, whose name labels the metrics.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._run = folder.name
        self._line: Mapping[str, Any] = {}
        self._tokens: dict[str, int] = {}
        self._written = -_SECONDS

    def on_step(self, line: Mapping[str, Any]) -> None:
        """Counts the tokens, and writes the file if it is due."""
        self._line = line
        for number, (tokens, _) in line["datasets"].items():
            self._tokens[number] = self._tokens.get(number, 0) + tokens
        if time.monotonic() - self._written >= _SECONDS:
            self._write()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Does nothing: the metrics are those of steps."""

    def close(self) -> None:
        """Writes the last step."""
        if self._line:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        partial = new_partial(self._path)
        try:
            write_new(partial, text_of(self._run, self._line, self._tokens).encode())
            publish(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)


def text_of(run: str, line: Mapping[str, Any], tokens: Mapping[str, int]) -> str:
    """Returns the metrics as text.

    Args:
        run: value of the label `run`.
        line: line of the last step.
        tokens: tokens of each dataset that this job has fed.

    >>> print(text_of("a", {"step": 3, "loss": 2.5, "grad_norm": None}, {"0": 512}), end="")
    # HELP trackbed_step Last recorded step
    # TYPE trackbed_step gauge
    trackbed_step{run="a"} 3
    # HELP trackbed_loss Mean loss of the last step
    # TYPE trackbed_loss gauge
    trackbed_loss{run="a"} 2.5
    # HELP trackbed_tokens_total Tokens that this job has fed
    # TYPE trackbed_tokens_total counter
    trackbed_tokens_total{run="a",dataset="0"} 512
    # EOF
    """
    name = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for key, what in _GAUGES.items():
        if line.get(key) is not None:
            lines += [f"# HELP trackbed_{key} {what}", f"# TYPE trackbed_{key} gauge"]
            lines.append(f'trackbed_{key}{{run="{name}"}} {line[key]}')
    lines += ["# HELP trackbed_tokens_total Tokens that this job has fed", "# TYPE trackbed_tokens_total counter"]
    lines += [f'trackbed_tokens_total{{run="{name}",dataset="{number}"}} {count}' for number, count in tokens.items()]
    return "\n".join([*lines, "# EOF"]) + "\n"
