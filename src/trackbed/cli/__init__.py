"""Command line: one module per command, and `main`, which collects them."""

__all__: list[str] = []
