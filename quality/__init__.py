"""Is a keyed shuffle as good as a random one? Statistics of it, with limits from a stated false-alarm rate.

A shuffle is anything that `shuffle(size, seed)(positions)` can be asked of. `python -m quality` runs the suite.
"""
