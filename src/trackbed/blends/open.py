"""Opening of the datasets of a blend: `trackbed.open_blend`."""

import os
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from trackbed.blends.blend_file import BlendFile
from trackbed.blends.measure import MeasuredBlend, measure_blend
from trackbed.blends.plan import plan_blend
from trackbed.blends.read import read_blend_file, read_blend_table, with_tokenizer
from trackbed.builder.builder import BlendedMegatronDatasetBuilder
from trackbed.cancellation import polling
from trackbed.comm import SOLO, Group
from trackbed.comm.launch import group_from_environment, threads_per_rank
from trackbed.comm.torch_group import current_group
from trackbed.datasets.blend.dataset import SplitDataset
from trackbed.datasets.config import OrderName
from trackbed.datasets.tokenizers.kinds import AnyTokenizer
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import is_integer

_WHERE = "trackbed.open_blend"


class MissingSplitError(ArgumentError, AttributeError):
    """A blend has none, or several, of the dataset that is asked for. `hasattr` is False."""


class Splits:
    """Datasets of training, validation and test.

    Args:
        name: name of the blend, for errors.
        built: the three datasets; None in the place of a dataset that the blend does not have, and for validation also
            a list of datasets.
        measured: the blend that they are opened from.
    """

    def __init__(
        self,
        name: str,
        built: Sequence[SplitDataset | list[SplitDataset] | None],
        measured: MeasuredBlend | None = None,
    ) -> None:
        self._name = name
        self._measured = measured
        self._found = dict(zip(("train", "valid", "test"), built, strict=True))

    @property
    def train(self) -> SplitDataset:
        """Dataset of training.

        Raises:
            ArgumentError: the blend has none.
        """
        return self._one("train")

    @property
    def valid(self) -> SplitDataset:
        """Dataset of validation.

        Raises:
            ArgumentError: the blend has none, or `multiple_validation_sets`.
        """
        return self._one("valid")

    @property
    def test(self) -> SplitDataset:
        """Dataset of test.

        Raises:
            ArgumentError: the blend has none.
        """
        return self._one("test")

    @property
    def measured(self) -> MeasuredBlend | None:
        """The blend that they are opened from, if it is known."""
        return self._measured

    @property
    def validation_sets(self) -> list[SplitDataset]:
        """Datasets of validation: several with `multiple_validation_sets`, else at most one."""
        found = self._found["valid"]
        if isinstance(found, list):
            return found
        return [] if found is None else [found]

    def _one(self, split: str) -> SplitDataset:
        dataset = self._found[split]
        if isinstance(dataset, list):
            raise MissingSplitError(f"{self._name}: split {split!r} has several datasets, which validation_sets lists")
        if dataset is None:
            known = ", ".join(repr(name) for name, one in self._found.items() if one is not None)
            raise MissingSplitError(
                f"{self._name}: the blend must have a split {split!r}, found {known}; its shares are set by split"
            )
        return dataset

    if not TYPE_CHECKING:  # type checkers would take every name for one that there is

        def __getattr__(self, name: str) -> SplitDataset:
            """Raises the error of a split that is missing, or of a name that there is not."""
            if name in ("train", "valid", "test"):
                return self._one(name)
            meant = next((split for split in ("train", "valid", "test") if name[:3] == split[:3]), None)
            hint = "" if meant is None else f"; did you mean {meant!r}?"
            raise AttributeError(f"splits have train, valid, test and validation_sets, found {name!r}{hint}")

    def with_train(self, dataset: SplitDataset) -> "Splits":
        """Returns the splits with another dataset of training."""
        return Splits(self._name, [dataset, self._found["valid"], self._found["test"]], self._measured)

    def __repr__(self) -> str:
        """Lists the datasets."""
        lines = [f"  {name}: {found!r}" for name, found in self._found.items() if found is not None]
        return "\n".join([f"Splits of {self._name}", *lines])


def open_blend(
    path: str | os.PathLike[str] | None = None,
    *,
    prefixes: Mapping[str, float] | Sequence[str] | None = None,
    sequence_length: int | None = None,
    split: str | None = None,
    size: int | Mapping[str, int | str] | None = None,
    tokenizer: "str | os.PathLike[str] | Mapping[str, Any] | AnyTokenizer | None" = None,
    cache: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    order: OrderName | None = None,
    timeout_seconds: float | None = None,
) -> Splits:
    """Opens the datasets of a blend, and builds indices that are missing.

    Collective over the ranks of `torch.distributed` if it is initialised, else over those that a launcher has started
    (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or Slurm's variables): each rank builds a part of the indices, and
    if a rank fails, all ranks raise an error that names it.

    Args:
        path: a blend file (docs/formats/blend-file.md). None if the arguments from `prefixes` to `order` describe the
            blend. Beside a blend file, only `tokenizer`, `cache` and `timeout_seconds` may be given.
        prefixes: weights of pairs by prefix or address; or a list of prefixes, which uses all samples of each pair
            once.
        sequence_length: S, tokens of a sample, at least 1.
        split: shares of training, validation and test in every pair, such as "98,1,1"; by default all is training.
        size: samples of training, or a mapping with the keys of the table `size` of a blend file, such as
            `{"train_tokens": "2B", "valid": 100}`. Required with weights.
        tokenizer: what a blend file has under this key, such as "tokenizer.json" or "bytes", or an object with `eod`,
            `pad`, `vocab_size` and `unique_identifiers`. Replaces the tokenizer of the blend file; required if the file
            has none.
        cache: folder of the indices; replaces the folder of the blend file.
        seed: seed of every shuffle, in `[0, 2**32)`; 1234 by default.
        order: order of the samples; "megatron" by default.
        timeout_seconds: seconds without a sign of life after which a rank counts as dead, and that ranks wait for each
            other at the start; 600 by default, and of `torch.distributed` its own timeout.

    Returns:
        The datasets of the splits, as `train`, `valid` and `test`.

    Raises:
        OSError: the blend file cannot be read.
        BlendFileError: settings are invalid, or data are missing or damaged; lists all problems.
        PlanError: the data cannot give the samples asked for.
        CacheError: an index cannot be read, built or written.
        CollectiveError: among several ranks, one of them failed, or they ask for different blends.
    """
    settings = {"prefixes": prefixes, "sequence_length": sequence_length, "split": split, "size": size}
    settings |= {"seed": seed, "order": order}
    is_number = isinstance(timeout_seconds, (int, float)) and not isinstance(timeout_seconds, bool)
    is_usable = timeout_seconds is None or (is_number and timeout_seconds > 0)  # not a NaN either
    group = _group(timeout_seconds if is_usable else None)
    with group.guarded("opening the blend") as step, polling(step.poll):
        if not is_usable:
            raise ArgumentError(f"{_WHERE}: timeout_seconds must be a number above 0, found {timeout_seconds!r}")
        if not isinstance(cache, (str, os.PathLike, NoneType)):
            raise ArgumentError(f"{_WHERE}: cache must be the path of a folder, found a {type(cache).__name__}")
        blend, opened = _measured(path, settings, tokenizer, None if cache is None else os.fspath(cache))
        builder = _builder(blend, opened, cache, group)
    return Splits(str(blend.file.path), builder.build(), blend)


def open_file_alone(file: BlendFile, *, tokenizer: Any = None, cache: str | os.PathLike[str] | None = None) -> Splits:
    """Opens the datasets of a blend file that was read, on this rank alone. The arguments are those of `open_blend`.

    Raises:
        BlendFileError: data are missing or damaged, or do not suffice; lists all problems.
    """
    blend, opened = _with_tokenizer(file, tokenizer)
    return Splits(str(file.path), _builder(blend, opened, cache, SOLO).build(), blend)


def _builder(
    blend: MeasuredBlend, tokenizer: Any, cache: str | os.PathLike[str] | None, group: Group
) -> BlendedMegatronDatasetBuilder[Any]:
    config = blend.config(tokenizer=tokenizer, cache=None if cache is None else os.fspath(cache))
    if "num_dataset_builder_threads" not in blend.file.options:
        config.num_dataset_builder_threads = threads_per_rank()
    return BlendedMegatronDatasetBuilder(
        blend.dataset_class, blend.sizes, lambda: True, config, group=group, headers=blend.headers
    )


def _measured(
    path: str | os.PathLike[str] | None, settings: Mapping[str, Any], tokenizer: Any, cache: str | None
) -> tuple[MeasuredBlend, Any]:
    """Returns the blend, and the tokenizer if it was given as an object."""
    if path is not None and not isinstance(path, (str, os.PathLike)):
        found = f"a {type(path).__name__}"
        raise ArgumentError(
            f"{_WHERE}: path must be that of a blend file, found {found}; prefixes are given as prefixes=..."
        )
    given = [name for name, value in settings.items() if value is not None]
    if path is None and settings["prefixes"] is None:
        raise ArgumentError(f"{_WHERE}: must have the path of a blend file, or prefixes, found neither")
    if path is not None and given:
        raise ArgumentError(
            f"{_WHERE}: a blend file must state these itself, found them given beside it: {', '.join(given)}"
        )
    file = read_blend_file(path) if path is not None else read_blend_table(_table(settings, cache), where=_WHERE)
    return _with_tokenizer(file, tokenizer)


def _with_tokenizer(file: BlendFile, tokenizer: Any) -> tuple[MeasuredBlend, Any]:
    is_setting = isinstance(tokenizer, (str, os.PathLike, Mapping))
    if is_setting:
        file = with_tokenizer(file, os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer)
    blend = measure_blend(file)
    plan_blend(blend).problems.stop()
    return blend, None if is_setting else tokenizer


def _table(settings: Mapping[str, Any], cache: str | None) -> dict[str, Any]:
    """Returns the arguments as the keys of a blend file."""
    prefixes, size = settings["prefixes"], settings["size"]
    if isinstance(prefixes, (str, os.PathLike)):
        prefixes = [prefixes]
    if not isinstance(prefixes, (Mapping, Sequence)):
        found = f"a {type(prefixes).__name__}"
        raise ArgumentError(
            f"{_WHERE}: prefixes must be a mapping to weights, or a list, as their order matters, found {found}"
        )
    wrong = [one for one in prefixes if not isinstance(one, (str, os.PathLike))]
    if wrong:
        raise ArgumentError(
            f"{_WHERE}: prefixes must be paths or addresses, found one of type {type(wrong[0]).__name__}"
        )
    weights = prefixes if isinstance(prefixes, Mapping) else {}
    datasets = [
        {
            "path": os.fspath(prefix),
            "name": os.fspath(prefix),
            **({"weight": _plain(weights[prefix])} if prefix in weights else {}),
        }
        for prefix in prefixes
    ]
    given = {
        name: _plain(settings[name]) for name in ("sequence_length", "seed", "order") if settings[name] is not None
    }
    if not (
        size is None or is_integer(size) or (isinstance(size, Mapping) and all(isinstance(key, str) for key in size))
    ):
        raise ArgumentError(
            f"{_WHERE}: size must be a number of samples, or a mapping with keys such as 'train', found {size!r}"
        )
    sizes = {} if size is None else dict(size) if isinstance(size, Mapping) else {"train": size}
    return {
        **given,
        "split": settings["split"] or "1",
        "dataset": datasets,
        **({"size": {key: _plain(value) for key, value in sizes.items()}} if sizes else {}),
        **({} if cache is None else {"cache": cache}),
    }


def _plain(value: Any) -> Any:
    """Returns a number of NumPy as one of Python, and other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _group(timeout_seconds: float | None) -> Group:
    """Returns the ranks of `torch.distributed`, else those of the launcher."""
    group = current_group() or group_from_environment(timeout_seconds, shares_port=True)
    return SOLO if group.size == 1 else group
