"""Damages files and draws hostile input."""
