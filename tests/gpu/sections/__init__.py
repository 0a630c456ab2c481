"""Sections of the acceptance on a GPU. Each is a program of its own: `python -m gpu.sections.NAME --out FOLDER`."""
