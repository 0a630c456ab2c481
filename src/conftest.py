"""Which modules have no docstrings to run, because a library that they need is not installed."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["trackbed/optim/square_sum_kernel.py"]
