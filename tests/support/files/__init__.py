"""Writes token files, blends, tokenizers and cache entries."""
