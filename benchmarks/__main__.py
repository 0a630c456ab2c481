"""`python -m benchmarks`: Trackbed against megatron-core, as a Markdown table."""

import logging
import sys
import tempfile
import warnings
from pathlib import Path

from benchmarks.harness import kernel_table, machine, memory_gigabytes_per_second, table


def main() -> int:
    """Run everything; 1 if megatron-core is quicker anywhere."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from benchmarks import orders, permutation
    from benchmarks.against_megatron import run

    rows = []
    for row in run(Path(tempfile.mkdtemp(prefix="trackbed-bench-"))):
        print(f"{row.what}: {row.ratio:.2f} times", file=sys.stderr)
        rows.append(row)
    kernels = []
    for row in orders.comparisons():
        print(f"{row.what}: {row.ratio:.2f} times", file=sys.stderr)
        kernels.append(row)
    print(f"Medians of runs that alternate in one process, on {machine()}.\n\n{table(rows)}\n")
    print(kernel_table(kernels, memory_gigabytes_per_second()))
    print(f"\nThe keyed permutation, one thread:\n\n{permutation.table(list(permutation.costs()))}")
    return int(any(row.ratio < 1 for row in [*rows, *kernels]))


if __name__ == "__main__":
    sys.exit(main())
