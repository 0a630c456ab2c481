from pathlib import Path

import pytest

from trackbed.datasets import ByteTokenizer
from trackbed.errors import ArgumentError
from trackbed.preprocess import PreprocessConfig, available_cores, preprocess


def test_as_many_workers_as_cores_are_the_default():
    assert PreprocessConfig(inputs=(Path("a"),), output="out").workers == available_cores() >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ()}, "inputs must name at least one file or folder, found none"),
        ({"output": "folder/"}, "output must end in a file name prefix, as in out/corpus, found 'folder/'"),
        ({"output": ""}, "output must end in"),
        ({"json_keys": ()}, "json_keys must be distinct"),
        ({"json_keys": ("a", "a")}, "json_keys must be distinct"),
        ({"json_keys": ("a/b",)}, "json_keys must be distinct and usable in a file name, found ['a/b']"),
        ({"json_keys": ("",)}, "json_keys must be distinct"),
        ({"workers": 0}, "workers must be at least 1, found 0"),
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1, found 0"),
    ],
)
def test_a_field_out_of_its_range_is_refused(change, message):
    with pytest.raises(ArgumentError) as caught:
        PreprocessConfig(**{"inputs": (Path("a"),), "output": "out", **change})
    assert str(caught.value).startswith(message)


def test_addresses_that_became_paths_are_told_so(tmp_path):
    hint = r"; pass an address as a string: Path turns s3:// into s3:/"
    with pytest.raises(ArgumentError, match=f"^s3:/bucket/out: output must be .*{hint}$"):
        PreprocessConfig(inputs=(tmp_path,), output=str(Path("s3://bucket/out")))
    config = PreprocessConfig(inputs=(Path("s3://bucket/key.jsonl"),), output=str(tmp_path / "out"))
    with pytest.raises(ArgumentError, match=f"^s3:/bucket/key.jsonl: an input must be a file .*{hint}$"):
        preprocess(config, ByteTokenizer())
