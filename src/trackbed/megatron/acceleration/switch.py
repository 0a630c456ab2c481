"""Puts Trackbed's functions in the place of Megatron Core's, and Megatron's own back."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from trackbed.megatron.acceleration import replacements
from trackbed.megatron.acceleration.mirror import build_missing
from trackbed.megatron.finder import Finder

COMPARED_WITH: Final = ("0.16.1",)
"""Releases of Megatron Core that tests compare with and without Trackbed's functions."""

_DATASETS: Final = "megatron.core.datasets"
_HELPERS: Final = f"{_DATASETS}.helpers"
_IN_MODULES: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    f"{_DATASETS}.gpt_dataset": {
        "_build_document_index": replacements.build_document_index,
        "_build_shuffle_index": replacements.build_shuffle_index,
    },
    _HELPERS: {
        "build_blending_indices": replacements.build_blending_indices,
        "build_exhaustive_blending_indices": replacements.build_exhaustive_blending_indices,
        "build_sample_idx": replacements.build_sample_idx,
    },
}
"""Functions by name and module, each of which takes Megatron's own first."""

_logger = logging.getLogger("trackbed")
_active: "list[Acceleration]" = []
"""What was replaced in this process; empty where nothing is."""


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A function of Megatron Core, and what takes its place."""

    where: str
    """Full name of its module or class."""
    name: str
    own: Any
    faster: Any


class Acceleration:
    """What `trackbed.megatron.accelerate()` has replaced in Megatron Core."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    @property
    def replaced(self) -> tuple[str, ...]:
        """Full names of the functions that Trackbed's stand in for; none after `undo()`."""
        return tuple(sorted(f"{one.where}.{one.name}" for one in self._replaced))

    def undo(self) -> None:
        """Puts Megatron's own functions back, wherever Trackbed's are now."""
        for one in self._replaced:
            for holder in _holders(one.name, one.faster):
                setattr(holder, one.name, one.own)
        self._replaced.clear()
        if self in _active:
            _active.remove(self)

    def __repr__(self) -> str:
        """Lists what is replaced."""
        return f"<Acceleration: {', '.join(self.replaced) or 'nothing is replaced'}>"

    def replace_functions(self) -> None:
        """Replaces the functions that are not replaced yet.

        Those of a checkout whose helpers are not compiled yet are left for the next call.
        """
        for where, faster in _IN_MODULES.items():
            try:
                module = import_module(where)
            except ModuleNotFoundError as error:
                if where != _HELPERS or error.name != f"{_HELPERS}_cpp":
                    raise
                continue
            for name, function in faster.items():
                own = getattr(module, name)
                self._replace(_Replaced(where, name, own, partial(function, own)))

    def replace_build(self) -> None:
        """Has the builder's `build()` look for missing indices first, and build them on all ranks."""
        where = f"{_DATASETS}.blended_megatron_dataset_builder"
        builder_class = import_module(where).BlendedMegatronDatasetBuilder
        own = builder_class.build

        @wraps(own)
        def build(builder: Any) -> Any:
            if self in _active:
                self.replace_functions()
                build_missing(builder)
            return own(builder)

        self._replace(_Replaced(f"{where}.{builder_class.__name__}", "build", own, build))

    def _replace(self, wanted: _Replaced) -> None:
        """Replaces a function wherever it is, unless another program has put its own there."""
        if any(wanted.own is one.faster for one in self._replaced):
            return
        if not str(getattr(wanted.own, "__module__", "")).startswith(_DATASETS):
            _logger.warning(
                "%s.%s: must be Megatron Core's own to be replaced, found %r", wanted.where, wanted.name, wanted.own
            )
            return
        for holder in _holders(wanted.name, wanted.own):
            setattr(holder, wanted.name, wanted.faster)
        self._replaced.append(wanted)


def _holders(name: str, function: Any) -> list[Any]:
    """Returns the modules and Megatron's builder class that have a function under its name.

    A module that has imported the function from another one has a reference of its own.
    """
    # The attributes themselves are not asked for: some modules import others when they are.
    modules = [one for one in list(sys.modules.values()) if issubclass(type(one), ModuleType)]
    builders = sys.modules.get(f"{_DATASETS}.blended_megatron_dataset_builder")
    classes = [] if builders is None else [vars(builders)["BlendedMegatronDatasetBuilder"]]
    return [one for one in (*modules, *classes) if vars(one).get(name) is function]


def switch_on(release: str | None) -> Acceleration:
    """Replaces what there is a faster counterpart of, once in a process.

    Args:
        release: version of the Megatron Core that is there; None if there is none.
    """
    if _active:
        return _active[0]
    acceleration = Acceleration()
    if release not in COMPARED_WITH:
        wanted, found = " or ".join(COMPARED_WITH), "none" if release is None else release
        _logger.warning("megatron-core: must be %s to be accelerated, found %s; it is left alone", wanted, found)
        return acceleration
    if any(_has_datasets(finder) for finder in sys.meta_path):
        _logger.info("megatron.core.datasets: trackbed.megatron.install() has replaced all of it")
        return acceleration
    _active.append(acceleration)
    try:
        acceleration.replace_functions()
        acceleration.replace_build()
    except BaseException:  # some module of Megatron's cannot be imported: nothing is replaced then
        acceleration.undo()
        raise
    _logger.info("megatron.core.datasets: Trackbed builds its indices")
    return acceleration


def _has_datasets(finder: object) -> bool:
    return isinstance(finder, Finder) and finder.root == "megatron.core" and "datasets.gpt_dataset" in finder.modules
