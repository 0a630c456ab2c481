"""Counts with their nouns, for messages."""


def number_of(count: int, noun: str, plural: str | None = None) -> str:
    """Returns a count with its noun in the singular or plural, which by default ends in an s.

    >>> number_of(1, "document"), number_of(64_000, "sample"), number_of(0, "index", "indices")
    ('1 document', '64,000 samples', '0 indices')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
