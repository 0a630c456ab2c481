"""Tokenizers: one module for each library, `kinds.py` for opening them by name."""
