"""A pytest plugin: stands in for what Megatron-LM's checkpoint tests import beside Megatron Core.

Its training package and the helpers for whole models are not used by the tests that run here; the base class of
nvidia-resiliency-ext is empty.
"""

import sys
from types import ModuleType
from unittest.mock import MagicMock

UNUSED = (
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.async_utils",
    "megatron.training.checkpointing",
    "megatron.training.global_vars",
    "megatron.training.training",
    "megatron.training.utils",
    "tests.unit_tests.dist_checkpointing.utils",
)
RESILIENCY = "nvidia_resiliency_ext"


class Unused(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class TensorAwareStateDict:
    """Stands in for the base class of state dictionaries for local checkpoints."""


for name in UNUSED:
    sys.modules[name] = Unused(name)
for name in ("", ".checkpointing", ".checkpointing.local", ".checkpointing.local.base_state_dict"):
    sys.modules[RESILIENCY + name] = ModuleType(RESILIENCY + name)
sys.modules[f"{RESILIENCY}.checkpointing.local.base_state_dict"].TensorAwareStateDict = TensorAwareStateDict
