"""Checkpoints as Megatron Core's programs expect them: its functions, strategies and wrappers."""

from importlib import import_module

import_module("trackbed.checkpoint")  # imports these modules, and must come first
