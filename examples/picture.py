"""Draws what the demo did: the losses of all runs, and what the blend drew against what it should."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from trackbed.ledger import RunRecord

mpl.use("Agg")
import matplotlib.pyplot as plt

LABELS = ("uninterrupted", "a rank killed, resumed on 2 ranks", "killed twice, resumed on 1 rank, then on 2")


def draw(path: Path, records: Sequence[RunRecord], weights: Sequence[float], names: Sequence[str]) -> None:
    """One PNG with two panels.

    Args:
        path: the file to write.
        records: those of the three runs.
        weights: shares of the corpora.
        names: the corpora, in the blend's order.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for record, label, color, width, style in zip(
        records, LABELS, ("0.75", "C0", "C3"), (5, 1.8, 1.8), ("-", "-", "--"), strict=True
    ):
        steps, losses = [one["step"] for one in record.steps], [one["loss"] for one in record.steps]
        left.plot(steps, losses, color=color, linewidth=width, linestyle=style, label=label)
        starts = {event["after_step"] for event in record.events if event["event"] == "begin"} - {0}
        left.plot(sorted(starts), [losses[step - 1] for step in sorted(starts)], "o", color=color)
    left.set(xlabel="step", ylabel="training loss (nats per token)", title="Killed, resumed (dots): the same losses")
    left.legend(frameon=False)

    drawn = [[one["datasets"].get(str(number), [0])[0] for number in range(len(names))] for one in records[0].steps]
    totals = [[sum(column) for column in zip(*drawn[: count + 1], strict=True)] for count in range(len(drawn))]
    for number, (name, weight) in enumerate(zip(names, weights, strict=True)):
        shares = [total[number] / sum(total) for total in totals]
        label = f"{name}: {shares[-1]:.1%} of tokens"
        right.plot(range(1, len(shares) + 1), shares, color=f"C{number}", label=label)
        right.axhline(weight, color=f"C{number}", linestyle=":", linewidth=1)
    right.set(
        xlabel="step",
        ylabel="share of the tokens so far",
        ylim=(0, 1),
        title="What the blend drew (dotted: its weights)",
    )
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
