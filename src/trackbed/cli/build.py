"""`trackbed build`: building the indices of a blend ahead of the job."""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import click

from trackbed.cli.parse import MEGATRON, Release, idx_cache_option
from trackbed.errors import ArgumentError, CacheError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.blends import MeasuredBlend
    from trackbed.comm import Group
    from trackbed.datasets import GPTDatasetConfig, MegatronIdentity


MOST_DATASETS: Final = 32_766
"""Maximum number of datasets in a blend of megatron-core, limited by its int16 dataset numbers."""
MOST_SHOWN: Final = 20


@click.command(
    short_help="Build the indices of a blend ahead of the job.",
    epilog="\b\nExample:\n  torchrun --nproc-per-node 8 -m trackbed build blend.toml",
)
@click.argument("path", metavar="BLEND.toml", type=click.Path(exists=True, dir_okay=False))
@click.option("--cache", metavar="FOLDER", help="Folder for the indices, instead of the file's `cache`.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of this process; by default its share of the cores.",
)
@click.option(
    "--plan", "plan_only", is_flag=True, help="Only show the missing indices, and how many each process would build."
)
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="With --plan: number of processes.")
@click.option(
    "--for", "reader", type=Release("trackbed"), default="trackbed", show_default=True, metavar="LIBRARY",
    help="Library that will read the indices. megatron-core, or a release such as megatron-core==0.19: also check "
    "names and limits for a Megatron job; needs the identity of the job's tokenizer.",
)  # fmt: skip
@click.option(
    "--tokenizer-identity",
    metavar="JSON",
    help='Identity of the tokenizer in Megatron: {"class": ..., "path": ..., "options": {...}}.',
)
@click.option(
    "--check-against",
    type=click.Choice([MEGATRON]),
    help="Start megatron-core on the indices; an error if it builds any. Implies --for megatron-core.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Seconds without a heartbeat after which a process counts as dead; by default 600.",
)
@click.option(
    "--secret-file", metavar="FILE", type=click.Path(dir_okay=False),
    help="With several processes: file of the secret that authenticates them to each other; by default in the cache. "
    "Created if missing; all hosts must see the same file.",
)  # fmt: skip
@idx_cache_option
def build(
    path: str,
    *,
    cache: str | None,
    threads: int | None,
    plan_only: bool,
    ranks: int | None,
    reader: str,
    tokenizer_identity: str | None,
    check_against: str | None,
    timeout: float | None,
    secret_file: str | None,
    idx_cache: str | None,
) -> None:
    """Build the indices of a blend file ahead of the job, so that the job starts at once.

    Runs as one process, or as several under torchrun or srun, each of which builds a fair share. Existing indices are
    not built again. The rendezvous of processes on several hosts is at MASTER_ADDR, or at the first host of the Slurm
    step; it listens there and on no other interface, unless torchrun's own store is used.
    """
    from trackbed.blends import measure_blend, plan_blend, read_blend_file
    from trackbed.builder import BlendedMegatronDatasetBuilder
    from trackbed.comm.launch import group_from_environment, has_several_ranks, parse_launch

    if ranks is not None and not plan_only:
        raise click.UsageError(
            "--ranks needs --plan; to build with several processes, start them with torchrun or srun"
        )
    is_shared, is_for_megatron = has_several_ranks(), reader != "trackbed" or check_against is not None
    file = read_blend_file(_named_as_in_a_job(path) if is_for_megatron else path)
    blend = measure_blend(file.with_idx_cache(idx_cache))
    plan_blend(blend).problems.stop()
    config = _config(blend, cache, threads, _identity(tokenizer_identity))
    if is_for_megatron:
        _check_readable(config, blend, reader.partition("==")[2])
    # Without a cache there is no place for a secret of the processes, and only the order instant builds nothing.
    if is_shared and not plan_only and config.path_to_cache is None and secret_file is None:
        launch = parse_launch(os.environ)
        if launch is not None and launch.rank == 0:
            click.echo("nothing to build: the order is instant")
        return
    secret = _secret(secret_file, config) if is_shared and not plan_only else None
    group = group_from_environment(timeout, secret=secret)
    make = partial(
        BlendedMegatronDatasetBuilder, blend.dataset_class, blend.sizes, lambda: True, config, headers=blend.headers
    )
    if plan_only:
        from trackbed.cli.build_progress import show_plan

        if group.rank == 0:
            show_plan(*make().plan(ranks or group.size), num_threads=config.num_dataset_builder_threads)
        return
    built = _run(make, group, config, blend.sizes)
    if is_for_megatron and group.rank == 0:
        _check_names(built, config)
    if check_against is not None and group.rank == 0:
        from trackbed.cli.check_against import check_against_megatron

        check_against_megatron(config, blend.sizes)
        click.echo(f"{MEGATRON} starts from {config.path_to_cache} and builds nothing")


def _named_as_in_a_job(path: str) -> str:
    """Returns the path of a blend file relative to the working directory, if it lies below.

    So its prefixes are relative to the working directory too, as they are in the command line of a job that runs there:
    the names of indices depend on them.
    """
    whole = Path(path).parent.resolve() / Path(path).name
    return str(whole.relative_to(Path.cwd())) if whole.is_relative_to(Path.cwd()) else path


def _config(
    blend: "MeasuredBlend", cache: str | None, threads: int | None, identity: "MegatronIdentity | None"
) -> "GPTDatasetConfig":
    from trackbed.comm.launch import threads_per_rank

    file = blend.file
    problems = file.problems()
    if file.tokenizer is None and identity is None:
        problems.add(("tokenizer",), "must be given to build a dataset, found none")
    if (cache or file.cache) is None and not file.is_computed:
        problems.add(("cache",), "must name a folder for the indices, found none: give --cache FOLDER")
    problems.stop()  # both omissions at once
    config = blend.config(tokenizer=_tokenizer(blend, identity), cache=cache)
    config.num_dataset_builder_threads = threads or threads_per_rank()
    return config


def _secret(path: str | None, config: "GPTDatasetConfig") -> bytes:
    """Returns the secret that the processes share, from the given file or else from the cache."""
    from trackbed.cli.secret import secret_path, shared_secret

    file = Path(path) if path is not None else secret_path(Path(str(config.path_to_cache)))
    try:
        return shared_secret(file)
    except OSError as error:
        raise ArgumentError(
            f"{file}: the processes must be able to read or create the secret, found: {error.strerror}; "
            "--secret-file names another file"
        ) from None


def _identity(text: str | None) -> "MegatronIdentity | None":
    from trackbed.datasets import MegatronIdentity

    if text is None:
        return None
    try:
        fields = json.loads(text)
        return MegatronIdentity(fields["class"], fields.get("path"), fields.get("options", {}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise click.UsageError(
            f'--tokenizer-identity must be JSON like {{"class": ..., "path": ..., "options": {{}}}}, found {text}'
        ) from error


def _tokenizer(blend: "MeasuredBlend", identity: "MegatronIdentity | None") -> Any:
    """Returns the file's tokenizer with this identity, or a minimal one if the file names none; None for None."""
    from dataclasses import replace

    from trackbed.blends import StatedTokenizer
    from trackbed.blends.tokenizer import make_tokenizer

    if identity is None:
        return None
    entry = blend.file.tokenizer
    if entry is None:
        return StatedTokenizer(eod=0, vocab_size=1, megatron_identity=identity)
    return make_tokenizer(replace(entry, megatron=identity))


def _check_readable(config: "GPTDatasetConfig", blend: "MeasuredBlend", release: str) -> None:
    """Refuses configurations whose indices megatron-core cannot read, or a release of it would not look for."""
    from trackbed.datasets.megatron_releases import option_of_releases

    wrong = None
    identity = config.tokenizer.unique_identifiers  # type: ignore[union-attr]  # config() gives one
    if config.order != "megatron":
        wrong = f'order must be "megatron", found "{config.order}"'
    elif config.groups:
        wrong = "groups must be merged into pairs, found some: list their files as datasets, or run trackbed merge"
    elif len(blend.members) > MOST_DATASETS:
        wrong = f"a blend must have at most {MOST_DATASETS} datasets, found {len(blend.members)}"
    elif "tokenizer_path" not in identity:
        wrong = (
            "tokenizer.megatron or --tokenizer-identity must state the identity of the job's tokenizer, found neither"
        )
    elif release and (option := option_of_releases(release, identity)) is not None:
        wrong = f"tokenizer.megatron must have {option} in release {release}, found the options of another release: "
        wrong += f"write the blend file by trackbed blend --from-megatron --for {MEGATRON}=={release}"
    if wrong is not None:
        raise ArgumentError(f"{blend.file.path}: for {MEGATRON}, {wrong}")


def _check_names(built: Sequence[Any], config: "GPTDatasetConfig") -> None:
    """Refuses indices that lack megatron-core's names, as it would read other files under those."""
    datasets = [
        dataset for one in built for dataset in (one if isinstance(one, list) else [one]) if dataset is not None
    ]
    members = [member for dataset in datasets for member in getattr(dataset, "datasets", [])]
    paths = [path for dataset in (*datasets, *members) for path in dataset.index_paths[:1]]
    aside = sorted({Path(path).name.rpartition("-")[0] for path in paths if "/.trackbed/" in path})
    if aside:
        more = f", and {len(aside) - MOST_SHOWN} more" if len(aside) > MOST_SHOWN else ""
        raise CacheError(
            f"{config.path_to_cache}: every index must have {MEGATRON}'s name, found {number_of(len(aside), 'name')} "
            "taken by an index of other data, for example of a regenerated corpus: remove NAME-* and "
            f".trackbed/NAME.json of each, and build again: {', '.join(aside[:MOST_SHOWN])}{more}"
        )


def _run(
    make: Callable[..., Any], group: "Group", config: "GPTDatasetConfig", sizes: Sequence[int | None]
) -> list[Any]:
    """Builds the indices, and shows the progress on the first process. Returns the datasets."""
    from trackbed.cache import await_flush
    from trackbed.cli.build_progress import show_building

    started = monotonic()
    with show_building(group) as progress:
        built: list[Any] = make(group=group, progress=progress).build()
    await_flush()  # otherwise the next job would verify the files after a power loss
    if group.rank > 0:
        return built
    samples = _samples(built, sizes, config)
    where = "nothing to build" if config.is_computed else f"indices are in {config.path_to_cache}"
    processes = f" with {group.size} processes" if group.size > 1 else ""
    click.echo(f"{where}, after {monotonic() - started:.1f} s{processes}; samples: {samples}")
    return built


def _samples(built: Sequence[Any], sizes: Sequence[int | None], config: "GPTDatasetConfig") -> str:
    """Returns the samples of each split, and in one clause why there are more than were asked for."""
    from trackbed.blends.plan import why_more_samples
    from trackbed.datasets import BlendedDataset

    parts, reasons = [], []
    for name, one, asked in zip(("train", "valid", "test"), built, sizes, strict=True):
        if one is None:
            continue
        is_more = asked is not None and not isinstance(one, list) and len(one) > asked
        parts.append(f"{name} {_length(one):,}{f' ({asked:,} asked for)' if is_more else ''}")
        reasons += [why_more_samples(config, is_blended=isinstance(one, BlendedDataset))] if is_more else []
    more = f"; there are more, as {' or '.join(dict.fromkeys(reasons))}" if reasons else ""
    return ", ".join(parts) + more


def _length(built: Any) -> int:
    return sum(map(len, built)) if isinstance(built, list) else len(built)
