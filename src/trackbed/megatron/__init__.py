"""Trackbed under Megatron Core's module paths.

For each of the parts "datasets", "distributed" and "dist_checkpointing", `trackbed.megatron.core.<part>.*` contains
Trackbed's counterparts of the names in `megatron.core.<part>.*`. After `trackbed.megatron.install()`, a program that
imports `megatron.core.<part>.*` runs on Trackbed.
"""

import logging
import re
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from trackbed.errors import ArgumentError, TrackbedError
from trackbed.megatron.finder import Finder
from trackbed.megatron.importers import importers_of
from trackbed.megatron.table import MODULES, PARTS, part_of
from trackbed.version import __version__

__all__ = ["install"]

_MEGATRON: Final = "megatron.core"
_COMPARED_WITH: Final = "0.16.1"
_logger = logging.getLogger("trackbed")
_IMPORTED_BY_CORE: Final = ("distributed", "dist_checkpointing")
"""Parts that `import megatron.core` imports."""

sys.meta_path.insert(0, Finder(f"{__name__}.core", MODULES))


def install(*, parts: Collection[str] = PARTS, exchange: Literal["auto", "none", "flat"] | None = None) -> None:
    """Makes Trackbed's modules importable under `megatron.core`, ahead of an installed megatron-core.

    `install(parts=("datasets",))` at the top of a program. Names that Trackbed does not provide still come from
    Megatron Core. Further calls add parts to those installed. A warning names another megatron-core than 0.16.1.

    A part must be installed before anything imports the package. `import megatron.core` imports the packages of the
    parts "distributed" and "dist_checkpointing".

    On GPUs, "distributed" is not measured yet; with `--async-save`, "dist_checkpointing" saves at once. Leave them out,
    as `install(parts=("datasets",))` does.

    Args:
        parts: packages below `megatron.core` whose names Trackbed provides, of "datasets", "distributed" and
            "dist_checkpointing".
        exchange: way in which `FullyParallelLoadStrategyWrapper` loads tensors that several ranks want, as for
            `trackbed.checkpoint.load`; None for that of Megatron Core, which the wrapper's `exchange_algo` names.

    Raises:
        ArgumentError: there is no such part, or `exchange` is unknown.
        TrackbedError: modules that would be replaced were already imported; the message names the importer.
    """
    if isinstance(parts, str) or not set(parts) <= set(PARTS):
        msg = f"parts: must be a collection of names among {PARTS}, found {parts!r}"
        raise ArgumentError(msg)
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
    _warn_of_other_version()
    active = [part for part in PARTS if any(part_of(path) == part for path in finder.modules)]
    _logger.info("megatron.core.%s: Trackbed %s is active", f", {_MEGATRON}.".join(active), __version__)


def _warn_of_other_version() -> None:
    """Logs a warning if megatron-core is there, in another version than the one that Trackbed is compared with."""
    found = _version_of_core()
    if found not in (None, _COMPARED_WITH):
        _logger.warning("megatron-core %s: must be %s to be what Trackbed is compared with", found, _COMPARED_WITH)


def _version_of_core() -> str | None:
    """Returns the version of the Megatron Core that would be imported, installed or a checkout; None if unknown."""
    spec = find_spec(_MEGATRON.partition(".")[0])  # a namespace: nothing is imported
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        info = Path(folder) / "core" / "package_info.py"
        if info.is_file():
            numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", info.read_text(), flags=re.MULTILINE))
            return ".".join(numbers.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
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
    msg = (
        f"trackbed.megatron.install() must come before {package} is imported{reason}; "
        f"found {_MEGATRON}.{first} imported by {importers_of(package)}{advice}"
    )
    raise TrackbedError(msg)
