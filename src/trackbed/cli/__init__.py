"""The command line: one file a command, and `main`, which has them all."""

__all__: list[str] = []
