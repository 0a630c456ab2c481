"""Data and checkpoints for trainers of other projects, one module for each, which needs that project installed.

The rest of Trackbed imports nothing of it. Import a name from its module: `trackbed.adapters.grain.MicroBatches`.
"""
