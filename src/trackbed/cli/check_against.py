"""Check that megatron-core finds every index that Trackbed built."""

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trackbed.errors import CacheError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.datasets import GPTDatasetConfig


def check_against_megatron(config: "GPTDatasetConfig", sizes: Sequence[int | None]) -> None:
    """Starts megatron-core in a separate process on the cache of `config`."""
    folder = Path(str(config.path_to_cache))
    request = {
        "config": {
            field.name: getattr(config, field.name) for field in fields(config) if _is_plain(config, field.name)
        },
        "sizes": list(sizes),
        "tokenizer": list(config.tokenizer.unique_identifiers.items()),  # type: ignore[union-attr]  # it was built with
    }
    before = _stamps(folder)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "trackbed.cli.check_against"],
        input=json.dumps(request),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise CacheError(f"{folder}: megatron-core must start from it, but: {last[0]}")
    after = _stamps(folder)
    changed = sorted(name for name in after if after[name] != before.get(name))
    if changed:
        raise CacheError(
            f"{folder}: megatron-core must find every index, but it built {number_of(len(changed), 'file')}, "
            f"{changed[0]} among them: compare the job's tokenizer and options with the blend file's"
        )


def _is_plain(config: "GPTDatasetConfig", name: str) -> bool:
    """True if a field is passed on unchanged; None is omitted, as it is the default there too."""
    return name not in ("tokenizer", "split_matrix", "mock") and getattr(config, name) is not None


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


class _Tokenizer(SimpleNamespace):
    """Minimal tokenizer for megatron-core to open indices with."""

    eod = eos = vocab_size = 1
    pad = None


def main() -> None:
    """Opens the datasets of a request from standard input with megatron-core."""
    request = json.load(sys.stdin)
    import tempfile

    import torch.distributed
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    known = {field.name for field in fields(GPTDatasetConfig) if field.init}
    given = {name: value for name, value in request["config"].items() if name in known}
    if given.get("blend"):
        given["blend"] = tuple(given["blend"])
    if given.get("blend_per_split"):
        given["blend_per_split"] = [one and tuple(one) for one in given["blend_per_split"]]
    tokenizer: Any = _Tokenizer(unique_identifiers=OrderedDict(request["tokenizer"]))
    with tempfile.TemporaryDirectory() as rendezvous:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}/store", rank=0, world_size=1)
        config = GPTDatasetConfig(tokenizer=tokenizer, **given)
        BlendedMegatronDatasetBuilder(GPTDataset, request["sizes"], lambda: True, config).build()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
