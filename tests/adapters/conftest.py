"""A blend of real text for trainers of other projects: the help topics and the sources of Python."""

import json
import pydoc_data.topics
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.adapters.training import SEQUENCE
from tests.support.files.built_pair import build

NEEDED = {
    "accelerate": "accelerate",
    "grain": "grain",
    "huggingface": "transformers",
    "lightning": "pytorch_lightning",
    "torchtitan": "torchtitan",
}
MISSING = [name for name, package in NEEDED.items() if find_spec(package) is None]
collect_ignore_glob = [pattern for name in MISSING for pattern in (f"test_{name}.py", f"{name}_rank.py")]

BLEND = f"""version = 1
sequence_length = {SEQUENCE}
order = "instant"
split = "90,10"
tokenizer = "bytes"
size = {{train = 400, valid = 20}}

[options]
eod_mask_loss = true

[[dataset]]
path = "topics"
weight = 0.6

[[dataset]]
path = "sources"
weight = 0.4
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with `blend.toml`, and `other.toml` with other weights."""
    folder = tmp_path_factory.mktemp("text")
    topics = [text.encode() for _, text in sorted(pydoc_data.topics.topics.items())]
    sources = [path.read_bytes() for path in sorted(Path(json.__file__).parents[1].glob("[a-c]*.py"))]
    for name, texts in {"topics": topics, "sources": sources}.items():
        build(folder / name, [[*text[:5000], 256] for text in texts], np.uint16)
    (folder / "blend.toml").write_text(BLEND)
    (folder / "other.toml").write_text(BLEND.replace("0.6", "0.5"))
    return folder
