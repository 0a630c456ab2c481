"""`python -m quality`: the statistics of Trackbed's permutation, or of another shuffle, as a Markdown table."""

import argparse
import sys
from typing import Final

from quality import locality
from quality.check import judge
from quality.report import table
from quality.shuffles import Shuffle, few_rounds, grain, trackbed
from quality.suite import FULL, SHORT, statistics

FALSE_ALARMS: Final = 1e-6
"""How likely a run of the suite fails random permutations."""

SHUFFLES: Final[dict[str, Shuffle]] = {"trackbed": trackbed, "two-rounds": few_rounds(2), "grain": grain}


def main() -> int:
    """Run the suite; 1 if a statistic is outside of its limits."""
    parser = argparse.ArgumentParser(prog="python -m quality", description=__doc__)
    parser.add_argument("--shuffle", choices=SHUFFLES, default="trackbed")
    parser.add_argument("--short", action="store_true", help="fewer seeds and sizes: seconds instead of minutes")
    parser.add_argument("--locality", action="store_true", help="figures of the permutation in blocks, without limits")
    options = parser.parse_args()
    if options.locality:
        print(locality.table())
        return 0
    plan = SHORT if options.short else FULL
    seed_bits = 32 if options.shuffle == "grain" else 64
    verdicts = judge(statistics(SHUFFLES[options.shuffle], plan, seed_bits=seed_bits), false_alarms=FALSE_ALARMS)
    failed = sum(not verdict.holds for verdict in verdicts)
    print(
        f"{options.shuffle}: {len(verdicts)} statistics, of which random permutations fail one in {FALSE_ALARMS:g} "
        f"runs.\n\n{table(verdicts)}\n\n{failed} failed"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
