"""The dataset of one split of a blend file, for commands that look into it."""

from typing import TYPE_CHECKING, Any

from trackbed.errors import ArgumentError

if TYPE_CHECKING:
    from trackbed.blends import BlendFile


def open_split(file: "BlendFile", split: str, cache: str | None) -> Any:
    """Opens the dataset of a split, and builds indices that are missing.

    Raises:
        ArgumentError: the blend has none of this split, or several.
        BlendFileError: data are missing or damaged; lists all problems.
    """
    from trackbed.blends import measure_blend, plan_blend
    from trackbed.builder import BlendedMegatronDatasetBuilder

    blend = measure_blend(file)
    plan_blend(blend).problems.stop()
    config = blend.config(cache=cache)
    built = BlendedMegatronDatasetBuilder(blend.dataset_class, blend.sizes, lambda: True, config).build()
    dataset = dict(zip(("train", "valid", "test"), built, strict=True))[split]
    if dataset is None or isinstance(dataset, list):
        found_instead = "several datasets (multiple_validation_sets)" if dataset else "none"
        raise ArgumentError(f"{file.path}: --split {split} must be one with one dataset, found {found_instead}")
    return dataset
