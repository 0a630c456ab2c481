"""Helpers that tests share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository: on the path, so that processes find `tests.support`, too
