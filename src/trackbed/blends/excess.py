"""Reasons why a split has more samples than were asked for."""

from trackbed.datasets.gpt.config import GPTDatasetConfig

__all__ = ["why_more_are_built", "why_more_samples"]


def why_more_samples(config: GPTDatasetConfig, *, is_blended: bool) -> str:
    """Returns the reason why a split has more samples than were asked for, as a clause."""
    if not is_blended:
        return "a dataset has all samples of the epochs that it needs"
    if config.renormalize_blend_weights is not None:
        return "the share of each dataset has a surplus of 0.5 %, as in Megatron Core 0.10, and is rounded up"
    return "the share of each dataset is rounded up"


def why_more_are_built(config: GPTDatasetConfig, *, has_weights: bool) -> str:
    """Returns the reason why datasets are built for more samples than are drawn from them, as a clause."""
    if not has_weights:
        return "a dataset without a weight has all samples of an epoch"
    if config.renormalize_blend_weights is not None:
        return "the share of each dataset has a surplus of 0.5 %, as in Megatron Core 0.10"
    percent = f"{100 * config.mid_level_dataset_surplus:g} %"
    return f"mid_level_dataset_surplus adds {percent} to the share of each dataset, rounded up"
