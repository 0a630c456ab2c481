"""Draws what the demo did: the loss of all three runs, and what the blend drew against what it should."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def draw(
    path: Path, whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], names: Sequence[str], weights: list[float]
) -> None:
    """One PNG with two panels.

    Args:
        path: the file to write.
        whole: what the uninterrupted run left: losses and drawn samples by step.
        parts: what the runs before and after the stop left.
        names: corpora, in the blend's order.
        weights: their shares.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    steps = [int(step) for step in whole["losses"]]
    left.plot(steps, list(whole["losses"].values()), color="0.75", linewidth=4, label="uninterrupted")
    for part, label, color in zip(parts, ("until the stop", "resumed in a new process"), ("C0", "C3"), strict=True):
        left.plot([int(step) for step in part["losses"]], list(part["losses"].values()), color=color, label=label)
    stop = max(int(step) for step in parts[0]["losses"]) + 0.5
    left.axvline(stop, color="0.4", linestyle="--", linewidth=1)
    left.annotate(
        "stopped, then resumed",
        (stop, left.get_ylim()[0]),
        xytext=(5, 5),
        color="0.3",
        textcoords="offset points",
    )
    left.set(xlabel="step", ylabel="training loss (nats per token)", title="Stopped, resumed: the same losses")
    left.legend(frameon=False)

    totals = list(accumulate(whole["drawn"].values(), lambda old, new: [a + b for a, b in zip(old, new, strict=True)]))
    for number, (name, weight) in enumerate(zip(names, weights, strict=True)):
        shares = [total[number] / sum(total) for total in totals]
        right.plot(steps, shares, color=f"C{number}", label=f"{name}: {shares[-1]:.1%} of samples")
        right.axhline(weight, color=f"C{number}", linestyle=":", linewidth=1)
    right.set(
        xlabel="step",
        ylabel="share of the samples so far",
        ylim=(0, 1),
        title="What the blend drew (dotted: its weights)",
    )
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
