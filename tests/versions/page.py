"""The table of `docs/reference/versions.md`: `python tests/versions/page.py` prints it."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.json"
HEAD = "| Python | torch | NumPy | megatron-core | architecture | passed | failed | skipped | date, commit |"


def rows(results: dict[str, dict[str, object]]) -> list[str]:
    """Lines of the table."""
    lines = [HEAD, "|---|---|---|---|---|---|---|---|---|"]
    for name in sorted(results):
        one = results[name]
        cells = [
            one["python"],
            one["torch"],
            one["numpy"],
            one["megatron-core"] or "-",
            one["machine"],
            f"{one['passed']:,}",
            f"{len(one['failed'])}",
            f"{one['skipped']:,}",
            f"{one['date']}, {one['commit']}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows(json.loads(RESULTS.read_text()))) + "\n")
