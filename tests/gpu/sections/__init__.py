"""Sections of the acceptance on a GPU, each a program of its own: `python -m tests.gpu.sections.NAME --out FOLDER`."""
