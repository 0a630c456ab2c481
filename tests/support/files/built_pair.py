"""Pairs made by the builder, and what lies beside them."""

import numpy as np

from trackbed.tokens import IndexedDatasetBuilder


def build(prefix, documents, dtype=np.int32, **options):
    """Write documents of one sequence each as the pair `prefix`."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype, **options)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def names_in(folder):
    """The names of all files in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())
