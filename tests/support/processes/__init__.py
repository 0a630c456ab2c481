"""Starts processes: tests of modules that import from here are marked `dist`."""
