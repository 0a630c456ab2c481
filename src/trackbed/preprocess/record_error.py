"""The error of one record."""

from trackbed.errors import FormatError


class RecordError(FormatError):
    """A record is bad; the message states what must hold and what was found, and the caller adds the location."""
