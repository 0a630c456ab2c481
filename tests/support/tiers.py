"""How many examples a property test takes, beyond what its tier says."""

from hypothesis import settings

with_files = settings(max_examples=min(settings().max_examples, 300))
"""For examples that write files and wait for the disk: enough, in a minute or two."""
