"""The release of Megatron Core that is installed, with which the conformance tests compare."""

from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version

from trackbed.datasets.megatron_releases import COMPARED_WITH, plans_layouts_elsewhere

try:
    RELEASE = version("megatron-core")
except PackageNotFoundError:
    RELEASE = COMPARED_WITH[0]
IS_NEWER = Version(RELEASE) >= Version("0.18")
"""Whether the last id of a `NullTokenizer` is in its vocabulary, BERT sorts ids, and documents can be kept apart."""

needs_the_wrappers_layouts = pytest.mark.skipif(
    plans_layouts_elsewhere(RELEASE), reason=f"the optimizer of megatron-core {RELEASE} plans the buffers"
)
"""For tests of the part "distributed", which has the arguments of megatron-core 0.16 and 0.17."""
