"""Who builds which index."""

from trackbed.build.assemble import BlendedMegatronDatasetBuilder, build_generic_dataset
from trackbed.build.sizes import Shares, check_sizes, plan_shares

__all__ = ["BlendedMegatronDatasetBuilder", "Shares", "build_generic_dataset", "check_sizes", "plan_shares"]
