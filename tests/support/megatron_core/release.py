"""The release of Megatron Core that is installed, with which the conformance tests compare."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from trackbed.datasets.megatron_releases import COMPARED_WITH

try:
    RELEASE = version("megatron-core")
except PackageNotFoundError:
    RELEASE = COMPARED_WITH[0]
IS_NEWER = Version(RELEASE) >= Version("0.18")
"""Whether the last id of a `NullTokenizer` is in its vocabulary, BERT sorts ids, and documents can be kept apart."""
