"""One-line error messages for the user."""

from trackbed.errors import BlendFileError, TrackbedError

EXPECTED = (TrackbedError, OSError, MemoryError)
"""Errors caused by the user's files, options or machine; any other error is a bug."""


def describe(error: BaseException) -> str:
    """Returns one line: the location, what must hold, and what was found.

    >>> describe(FileNotFoundError(2, "No such file or directory", "corpus.idx"))
    'corpus.idx: No such file or directory'
    """
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        message = f"this must fit into memory, found too little free{f': {message}' if message else ''}"
    return " ".join(message.splitlines())


def describe_all(error: BaseException) -> list[str]:
    """Returns one line, or one for each of the first problems of a blend file."""
    return list(error.shown) if isinstance(error, BlendFileError) else [describe(error)]
