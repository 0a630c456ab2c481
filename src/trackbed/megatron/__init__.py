"""Trackbed under Megatron Core's module paths.

For each of the parts "datasets", "distributed" and "dist_checkpointing", `trackbed.megatron.core.<part>.*` contains
Trackbed's counterparts of the names in `megatron.core.<part>.*`. After `trackbed.megatron.install()`, a program that
imports `megatron.core.<part>.*` runs on Trackbed.

`trackbed.megatron.accelerate()` keeps Megatron Core's datasets, and has Trackbed build their indices.

`save`, `load` and other functions, strategies and wrappers of `dist_checkpointing` are imported from here, too, where
they lie in several modules of Megatron Core. Their arguments are Megatron Core's, of 0.16.1 to 0.19. So are
`DistributedDataParallel`, its configuration and `finalize_model_grads`, with the arguments of 0.16.1.
`packed_seq_params` makes Megatron Core's object for attention over packs.
"""

import logging
import re
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from trackbed.errors import ArgumentError, TrackbedError
from trackbed.lazy_names import lazy_attributes
from trackbed.megatron.finder import Finder, importers_of
from trackbed.megatron.table import MODULES, PARTS, part_of
from trackbed.version import __version__

if TYPE_CHECKING:
    from trackbed.checkpoint.format.config_file import CheckpointingConfig, maybe_load_config
    from trackbed.checkpoint.state.sharded_tensor import ReplicaId, ShardedBase, apply_factory_merges, is_main_replica
    from trackbed.megatron.acceleration.switch import Acceleration
    from trackbed.megatron.checkpoints.async_requests import AsyncCallsQueue, AsyncRequest
    from trackbed.megatron.checkpoints.entries import apply_factories
    from trackbed.megatron.checkpoints.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
        distribute_main_replicas_with_precomputed_distribution,
    )
    from trackbed.megatron.checkpoints.serialization import (
        check_is_distributed_checkpoint,
        get_default_load_sharded_strategy,
        get_default_save_sharded_strategy,
        load,
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_sharded_metadata,
        load_tensors_metadata,
        remove_sharded_tensors,
        save,
        save_config,
    )
    from trackbed.megatron.checkpoints.shard_exchange import (
        ShardDistribution,
        determine_main_replica_uniform_distribution,
        distribute_shards_to_ranks,
        exchange_by_distribution,
        exchange_loaded_objects_gather_object,
        exchange_loaded_tensors_broadcast,
        exchange_loaded_tensors_gather_object,
        exchange_loaded_tensors_gather_rounds,
    )
    from trackbed.megatron.checkpoints.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
    from trackbed.megatron.checkpoints.strictness import (
        StrictHandling,
        determine_global_metadata,
        parse_strict_flag,
        validate_integrity_and_strict_load,
        validate_sharding_integrity,
    )
    from trackbed.megatron.ddp import DistributedDataParallel, finalize_model_grads
    from trackbed.megatron.ddp_config import DistributedDataParallelConfig
    from trackbed.megatron.packed_batches import packed_seq_params

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CheckpointingConfig",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "ReplicaId",
    "ShardDistribution",
    "ShardedBase",
    "StrictHandling",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "accelerate",
    "apply_factories",
    "apply_factory_merges",
    "check_is_distributed_checkpoint",
    "determine_global_metadata",
    "determine_main_replica_uniform_distribution",
    "distribute_main_replicas_with_precomputed_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "finalize_model_grads",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "install",
    "is_main_replica",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "maybe_load_config",
    "packed_seq_params",
    "parse_strict_flag",
    "remove_sharded_tensors",
    "save",
    "save_config",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
]

_MEGATRON: Final = "megatron.core"
_logger = logging.getLogger("trackbed")
_IMPORTED_BY_CORE: Final = ("distributed", "dist_checkpointing")
"""Parts that `import megatron.core` imports."""

# A program with data alone uses none of these names: the modules of the other two parts are not imported for it.
__getattr__ = lazy_attributes(
    __name__,
    {
        name: source.partition(":")[0]
        for path, names in MODULES.items()
        if part_of(path) in ("dist_checkpointing", "distributed")
        for name, source in names.items()
        if name in __all__
    }
    | {"packed_seq_params": "trackbed.megatron.packed_batches"},
)

sys.meta_path.insert(0, Finder(f"{__name__}.core", MODULES))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def install(*, parts: Collection[str] | None = None, exchange: Literal["auto", "none", "flat"] | None = None) -> None:
    """Makes Trackbed's modules importable under `megatron.core`, ahead of an installed megatron-core.

    `install(parts=("datasets",))` at the top of a program. Names that Trackbed does not provide still come from
    Megatron Core. Further calls add parts to those installed. A warning names another megatron-core than 0.16.1 and
    0.19.2.

    A part must be installed before anything imports the package. `import megatron.core` imports the packages of the
    parts "distributed" and "dist_checkpointing".

    "distributed" has the arguments of megatron-core 0.16 and 0.17; later ones plan the layout of the buffers in their
    optimizer. On GPUs, it is not measured yet; with `--async-save`, "dist_checkpointing" saves at once. Leave them out,
    as `install(parts=("datasets",))` does.

    Args:
        parts: packages below `megatron.core` whose names Trackbed provides, of "datasets", "distributed" and
            "dist_checkpointing"; by default all that the installed megatron-core allows.
        exchange: way in which `FullyParallelLoadStrategyWrapper` loads tensors that several ranks want, as for
            `trackbed.checkpoint.load`; None for that of Megatron Core, which the wrapper's `exchange_algo` names.

    Raises:
        ArgumentError: there is no such part, or not for the installed megatron-core, or `exchange` is unknown.
        TrackbedError: modules that would be replaced were already imported; the message names the importer.
    """
    release = _version_of_core()
    parts = _check_parts(parts, release)
    if exchange is not None:
        from trackbed.megatron.checkpoints.fully_parallel import choose_exchange

        choose_exchange(exchange)
    installed = [finder for finder in sys.meta_path if isinstance(finder, Finder) and finder.root == _MEGATRON]
    present = installed[0].modules if installed else {}
    added = {path: names for path, names in MODULES.items() if part_of(path) in parts and path not in present}
    if not added:
        return
    _require_not_imported(added)
    finder = Finder(_MEGATRON, {**present, **added})
    if installed:
        sys.meta_path[sys.meta_path.index(installed[0])] = finder
    else:
        sys.meta_path.insert(0, finder)
    _take_release(release)
    active = [part for part in PARTS if any(part_of(path) == part for path in finder.modules)]
    _logger.info("megatron.core.%s: Trackbed %s is active", f", {_MEGATRON}.".join(active), __version__)


def accelerate() -> "Acceleration":
    """Has Megatron Core's datasets build their indices with Trackbed's kernels, on all ranks.

    One line in a program, on every rank, before or after it imports `megatron.core`. Datasets, samples and files of the
    cache are Megatron's, bit for bit. Its functions on indices become calls of Trackbed's kernels, also where other
    modules have imported them under their names. `BlendedMegatronDatasetBuilder.build()` first has all ranks build what
    `path_to_cache` lacks, if its datasets are `GPTDataset`s of files.

    Another megatron-core than 0.16.1 is left alone, with a warning. A second call returns the same object.

    Returns:
        An object whose `replaced` are the names of what is replaced, and whose `undo()` puts Megatron's own back.
    """
    from trackbed.megatron.acceleration.switch import switch_on

    return switch_on(_version_of_core())


def _check_parts(parts: Collection[str] | None, release: str | None) -> Collection[str]:
    """Returns the parts to install: those that are asked for, or all that the release allows."""
    from trackbed.datasets.megatron_releases import plans_layouts_elsewhere

    if parts is not None and (isinstance(parts, str) or not set(parts) <= set(PARTS)):
        raise ArgumentError(f"parts: must be a collection of names among {PARTS}, found {parts!r}")
    if release is None or not plans_layouts_elsewhere(release):
        return PARTS if parts is None else parts
    if parts is None:
        _logger.warning(
            "megatron-core %s: keeps its own megatron.core.distributed, as its optimizer plans the buffers", release
        )
        return [part for part in PARTS if part != "distributed"]
    if "distributed" in parts:
        raise ArgumentError(
            "parts: 'distributed' must be left out with megatron-core 0.18 and later, whose optimizer plans the "
            f"buffers, found {release}"
        )
    return parts


def _take_release(found: str | None) -> None:
    """Follows the release that is there, with a warning if it is none that Trackbed is compared with."""
    from trackbed.datasets.megatron_releases import COMPARED_WITH, use_release

    if found is not None:
        use_release(found)
    if found not in (None, *COMPARED_WITH):
        wanted = " or ".join(COMPARED_WITH)
        _logger.warning("megatron-core %s: must be %s to be what Trackbed is compared with", found, wanted)


def _version_of_core() -> str | None:
    """Returns the version of the Megatron Core that would be imported, installed or a checkout; None if unknown."""
    spec = find_spec(_MEGATRON.partition(".")[0])  # a namespace: nothing is imported
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        info = Path(folder) / "core" / "package_info.py"
        if info.is_file():
            numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", info.read_text(), flags=re.MULTILINE))
            return ".".join(numbers.get(name, "0") for name in ("MAJOR", "MINOR", "PATCH"))
    return None


def _require_not_imported(paths: Collection[str]) -> None:
    """Raises TrackbedError if one of the modules of Megatron Core is imported."""
    early = [path for path in paths if f"{_MEGATRON}.{path}" in sys.modules]
    if not early:
        return
    by_core = [path for path in early if part_of(path) in _IMPORTED_BY_CORE]
    first = (by_core or early)[0]
    package = _MEGATRON if by_core else f"{_MEGATRON}.{part_of(first)}"
    reason = f", which imports {_MEGATRON}.{part_of(first)}" if by_core else ""
    advice = '; install(parts=("datasets",)) is possible after it' if by_core else ""
    raise TrackbedError(
        f"trackbed.megatron.install() must come before {package} is imported{reason}; "
        f"found {_MEGATRON}.{first} imported by {importers_of(package)}{advice}"
    )
