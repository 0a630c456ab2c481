"""Comparison of the datasets that ranks request: file sizes, digests and options, but not the folders of files.

Shapes: I items of a request, in the same order on every rank.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trackbed.builder.plan_split import blend_of
from trackbed.cache import LazyArrays
from trackbed.cache.entry import shortened
from trackbed.comm.difference import first_difference, first_unlike_item
from trackbed.datasets.blend.dataset import BlendedDataset
from trackbed.datasets.cached import CachedDataset, is_ours
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.identity import plain
from trackbed.datasets.megatron_dataset import MegatronDataset
from trackbed.index.splits import Split

_OPTIONS: Final = (
    "order",
    "blend_stages",
    "blend_max_epochs",
    "blend_when_exhausted",
    "shuffle_block",
    "shuffle_window",
    "multiple_validation_sets",
)
_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class Item:
    """A dataset, a blend or the options that a rank requests."""

    name: str
    """Its name in messages, such as the prefix of a pair. Not compared."""
    key: str
    """Text that is the same on two ranks if and only if `fields()` is."""
    fields: Callable[[], dict[str, Any]]
    """Returns the values that are compared, by name."""
    has_to_agree: bool = True
    """False if ranks may differ: where the class of a dataset is not Trackbed's, nothing says what its data are."""


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Everything that a rank requests."""

    items: Sequence[Item]
    """`[I]`"""

    def digest(self, *, has_to_agree: bool) -> str:
        """Returns a digest of the items that have to agree, or of the others."""
        keys = [item.key if item.has_to_agree is has_to_agree else "" for item in self.items]
        return _digest("\n".join(keys)) if any(keys) else ""

    def digests(self, *, has_to_agree: bool) -> list[str]:
        """Returns the `[I]` digest of each item; an empty one for an item of the other kind."""
        return [_digest(item.key) if item.has_to_agree is has_to_agree else "" for item in self.items]

    def describe(self, number: int) -> list[Any]:
        """Returns name and fields of an item, as JSON values; nothing for a number past the last item."""
        if number >= len(self.items):
            return ["nothing", {}]
        item = self.items[number]
        return [item.name, json.loads(json.dumps(item.fields(), default=plain))]


def request_of(
    built: Iterable[Any],
    cls: type[MegatronDataset],
    sizes: Sequence[int | None],
    config: BlendedMegatronDatasetConfig,
) -> RankRequest:
    """Returns the request of a rank that has made these datasets.

    Args:
        built: datasets and blends, or lists of them; None for a split without data.
        cls: class of the datasets.
        sizes: samples asked for per split.
        config: configuration of the builder.
    """
    options = _options_of(cls, sizes, config)
    items = [Item("the arguments of the builder", json.dumps(options, default=plain), lambda: options)]
    for one in built:
        for dataset in one if isinstance(one, list) else [one]:
            items += _items_of(dataset)
    return RankRequest(items)


def _items_of(dataset: Any) -> list[Item]:
    if isinstance(dataset, BlendedDataset):
        name = f"the blend of split {dataset.split.name}"
        fields = {"num_datasets": len(dataset.datasets), "weights": dataset.weights, "size": dataset.size}
        key = json.dumps(fields, default=plain)
        return [Item(name, key, lambda: fields), *[item for member in dataset.datasets for item in _items_of(member)]]
    if not isinstance(dataset, MegatronDataset):
        return []
    name = f"{dataset.dataset_path}, split {dataset.index_split.name}"
    if _has_index(dataset):
        return [Item(name, dataset.agreed_key, dataset.agreed_values)]
    return [Item(name, dataset.unique_description, lambda: dict(dataset.unique_identifiers), has_to_agree=False)]


def _has_index(dataset: MegatronDataset) -> bool:
    """True for classes of ours, and for others' that keep an index in the cache."""
    has_arrays = any(isinstance(one, LazyArrays) for one in vars(dataset).values())
    return is_ours(type(dataset)) or isinstance(dataset, CachedDataset) or has_arrays


def _options_of(
    cls: type[MegatronDataset], sizes: Sequence[int | None], config: BlendedMegatronDatasetConfig
) -> dict[str, Any]:
    options: dict[str, Any] = {"class": cls.__name__}
    options["sizes"] = {split.name: size for split, size in zip(Split, sizes, strict=True)}
    options.update({name: getattr(config, name) for name in _OPTIONS})
    for split in Split:
        blend = blend_of(split, config)
        options[f"number of datasets of split {split.name}"] = 0 if blend is None else len(blend[0])
        options[f"weights of split {split.name}"] = (
            "given" if blend is not None and blend[1] is not None else "not given"
        )
    return options


def unlike_item(digests: Sequence[Sequence[str] | None]) -> int:
    """Returns the number of the first item in which two ranks differ, given the digests of both, None for all others.

    >>> unlike_item([["a", "b"], None, ["a", "c", "d"]]), unlike_item([["a"], ["a", "b"]])
    (1, 1)
    """
    return first_unlike_item(*(of_rank for of_rank in digests if of_rank is not None))


def describe_unlike_items(described: Sequence[Any]) -> str:
    """Returns the first difference in words, given `RankRequest.describe` of two ranks, None for all others.

    >>> describe_unlike_items([["a", {"seed": 1, "size": [5, 6]}], None, ["b", {"seed": 1, "size": [5, 7]}]])
    'a (rank 2: b): size[1] is 6 on rank 0 and 7 on rank 2'
    """
    (first, (name, fields)), (second, (other, others)) = (pair for pair in enumerate(described) if pair[1] is not None)
    difference = first_difference((first, fields), (second, others))
    where = name if name == other else f"{name} (rank {second}: {other})"
    return (
        f"{where}: {difference.field or 'what is asked for'} is {shortened(difference.usual_value)} on rank {first} "
        f"and {shortened(difference.value)} on rank {second}"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
