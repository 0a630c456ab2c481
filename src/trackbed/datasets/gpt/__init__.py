"""Datasets of GPT: samples of a fixed length, cut from a shuffled stream of documents."""
