"""`python -m benchmarks.proportions`: draws how far each order strays from the weights.

Shapes: K datasets, N samples.
"""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt

from trackbed.index import InstantOrder, balanced_blend, greedy_blend, largest_remainders

WEIGHTS = np.array([0.4, 0.3, 0.2, 0.1])
NUM_SAMPLES = 1_000_000
PICTURE = Path(__file__).parents[1] / "docs" / "explanation" / "proportions.svg"


def strays(datasets: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """`[N]` how far the dataset that is furthest from its share is from it, after each sample."""
    positions = np.arange(1, len(datasets) + 1)
    return np.max([np.abs(np.cumsum(datasets == d) - weight * positions) for d, weight in enumerate(WEIGHTS)], axis=0)


def main() -> None:
    """Draw it, and print the largest figure of each order."""
    instant = InstantOrder(sizes=[NUM_SAMPLES] * len(WEIGHTS), weights=WEIGHTS, seed=1234)
    orders = {
        "megatron": greedy_blend(WEIGHTS, NUM_SAMPLES)[0],
        "balanced": balanced_blend(largest_remainders(WEIGHTS.tolist(), NUM_SAMPLES), seed=1234)[0],
        "instant": instant.locate(np.arange(NUM_SAMPLES))[0],
    }
    mpl.rcParams["svg.hashsalt"] = "trackbed"
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    points = np.unique(np.geomspace(1, NUM_SAMPLES, 400).astype(np.int64)) - 1
    for (name, datasets), style in zip(orders.items(), ("-", "-", "--"), strict=True):
        far = strays(datasets)
        axes.plot(points + 1, np.maximum.accumulate(far)[points], style, label=f'order="{name}"')
        print(f"{name}: at most {far.max():.1f} samples from its share")
    axes.set(xscale="log", yscale="log", xlabel="samples drawn", ylabel="samples from the share, largest so far")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
