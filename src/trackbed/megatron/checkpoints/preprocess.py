"""Division of state dictionaries as Megatron Core's functions make it. Names are those of 0.16.1."""

from collections.abc import Callable
from typing import Any

from trackbed.checkpoint.state.describe import check_places
from trackbed.checkpoint.state.factory import ShardedTensorFactory
from trackbed.checkpoint.state.partial_tensors import check_whole, check_whole_shards
from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.checkpoint.state.tree import Tree, dict_list_map_outplace, extract_matching_values, nested_values
from trackbed.megatron.checkpoints.entries import clean_metadata, extract_nonpersistent, extract_sharded_base
from trackbed.megatron.checkpoints.strictness import determine_global_metadata, validate_sharding_integrity
from trackbed.megatron.checkpoints.trees import apply_factories, dict_list_map_inplace


def save_preprocess(
    sharded_state_dict: Tree,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
) -> tuple[Tree, Any]:
    """Divides a state dictionary that is to be saved, which is left as it is.

    Args:
        sharded_state_dict: state dictionary.
        validate_access_integrity: True to check the shards of all ranks, which is collective.
        preprocess_common_before_consistancy_check: returns the part of the common state that all ranks must share; it
            gets a copy of the containers.

    Returns:
        The entries, with factories applied, and the common state.
    """
    built = dict_list_map_outplace(
        lambda value: value.build() if isinstance(value, ShardedTensorFactory) else value, sharded_state_dict
    )
    check_places(built)
    _, rest = extract_nonpersistent(built)
    entries, common = extract_sharded_base(rest)
    check_whole(common)
    check_whole_shards(list(nested_values(entries)))
    if isinstance(common, dict) and "content_metadata" in common:
        common["content_metadata"] = clean_metadata(common["content_metadata"])
    if validate_access_integrity:
        compared = common
        if preprocess_common_before_consistancy_check is not None:
            compared = preprocess_common_before_consistancy_check(dict_list_map_outplace(lambda value: value, common))
        validate_sharding_integrity(determine_global_metadata(entries)[1], common_state_dict=compared)
    return entries, common


def load_preprocess(sharded_state_dict: Tree) -> tuple[Tree, Tree, Tree]:
    """Divides a state dictionary that is to be loaded, which is left as it is.

    Returns:
        All but local values, with factories applied; local values; and the factories, without data and with lists as
        dictionaries by position.
    """
    copied, _ = extract_matching_values(sharded_state_dict, lambda _: True)
    factories, _ = extract_matching_values(
        copied, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    dict_list_map_inplace(ShardedTensorFactory.without_data, factories)
    local, rest = extract_nonpersistent(copied)
    dict_list_map_inplace(LocalNonpersistentObject.unwrap, local)
    return rest, local, factories


def filter_out_empty_flatten_tensor(sharded_state_dict: Tree) -> Tree:
    """Returns a copy without tensors whose `flattened_range` is empty, which no tensor has any more."""
    kept, _ = extract_matching_values(
        sharded_state_dict, lambda value: not (isinstance(value, ShardedTensor) and value.flattened_range is not None)
    )
    return kept
