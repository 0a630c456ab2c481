"""Builds datasets through `megatron.core` on one rank, with Trackbed's functions or without.

    builds_rank.py WHEN REQUESTS

WHEN is "never", or when `accelerate()` is called: "before" `megatron.core` is imported, or "after" it; "undone" for
Megatron's own functions after `undo()`. REQUESTS is a file of JSON, a list of what `observe.py` takes, with `of_rank`
for fields of the configuration that one rank has. Writes a line of JSON for each: its answer, and the number of arrays
that Megatron's own code has saved on this rank; and then a line with the names of what was replaced.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed

import trackbed.megatron
from tests.support.megatron_core.cases import identity
from tests.support.megatron_core.observe import answer, megatron_tokenizer

WHEN, REQUESTS = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
found = trackbed.megatron.accelerate() if WHEN == "before" else None

from megatron.core.datasets import gpt_dataset  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import _build_shuffle_index  # noqa: E402
from megatron.core.datasets.helpers import build_sample_idx  # noqa: E402


def own_functions():
    """The functions as other modules find them, and as this one has imported them."""
    return (
        BlendedMegatronDatasetBuilder.build,
        gpt_dataset._build_document_index,
        _build_shuffle_index,
        build_sample_idx,
    )


BEFORE = own_functions()
if WHEN in ("after", "undone"):
    found = trackbed.megatron.accelerate()
    assert all(one is not other for one, other in zip(own_functions(), BEFORE, strict=True))
if WHEN == "undone":
    found.undo()
    assert all(one is other for one, other in zip(own_functions(), BEFORE, strict=True))
if WHEN in ("before", "after"):
    assert trackbed.megatron.accelerate() is found

saved = []
np_save = np.save


def save(path, *arguments, **options):
    """Counts the arrays that Megatron's datasets save."""
    saved.append(path)
    return np_save(path, *arguments, **options)


np.save = save
torch.distributed.init_process_group("gloo")
for request in REQUESTS:
    saved.clear()
    request["config"] |= request.get("of_rank", {}).get(os.environ["RANK"], {})
    request["tokenizer"]["identity"] = identity(request["tokenizer"])
    answered = answer(request, megatron_tokenizer(request["tokenizer"]), "megatron.core")
    torch.distributed.barrier()
    print(json.dumps([answered, len(saved)]))
print(json.dumps(found.replaced if found else []))
torch.distributed.destroy_process_group()
