"""Checkpoints of a run, in one folder: saved while training goes on, kept or removed, and found again."""

from trackbed.checkpointer.checkpointer import Checkpointer
from trackbed.checkpointer.records import SaveRecord

__all__ = ["Checkpointer", "SaveRecord"]
