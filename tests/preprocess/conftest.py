"""A small corpus, a tokenizer trained on similar text, and a Ray of this process."""

import json
import os
import sys
import warnings

import pytest

from trackbed.preprocess import TrainingConfig, train_tokenizer

TEXTS = ["the cat sat on the mat", "  the dog\n\n", "", "Straße 東京 🙂 <|endoftext|> end", "the the the"]


@pytest.fixture
def corpus(tmp_path):
    """Five records: plain, with surrounding white space, empty, in other scripts, and of repeated words."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": text[:3]}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """Byte-level BPE of at most 300 tokens, the first of which is `<|endoftext|>`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "texts.txt").write_text("the cat sat on the mat\n" * 9, encoding="utf-8")
    config = TrainingConfig(inputs=(folder / "texts.txt",), vocab_size=300)
    return train_tokenizer(config, folder / "tokenizer.json").path


@pytest.fixture(scope="module")
def local_ray():
    """Ray with two cores; engines that find it do not end it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # workers import the functions of tests
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield ray
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
