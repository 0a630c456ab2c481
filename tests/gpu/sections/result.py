"""What a section has found, as a file that `accept.py` reads."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Result:
    """Outcome of a section.

    Attributes:
        passed: names of the checks that passed.
        failed: reasons of those that did not, by name.
        not_run: reasons of those that were not run, by name.
        figures: whatever was measured.
    """

    passed: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)

    def line(self, name: str, value: float, wanted: float, *, at_least: bool = False) -> None:
        """Records a figure that is to be at most, or at least, some number."""
        is_met = value >= wanted if at_least else value <= wanted
        sign = ">=" if at_least else "<="
        self.figures[name] = {"value": value, "wanted": f"{sign} {wanted:g}", "is_met": is_met}
        if is_met:
            self.passed.append(name)
        else:
            self.failed[name] = f"{value:.4g}, wanted {sign} {wanted:g}"


def run_section(name: str, run: Any) -> None:
    """Runs a section as a program, and writes what it has found into `NAME.json`."""
    parser = argparse.ArgumentParser(description=f"the section {name} of the acceptance on a GPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    began, result = time.monotonic(), Result()
    try:
        run(out, result)
    finally:
        found = {"seconds": time.monotonic() - began, **dataclasses.asdict(result)}
        (out / f"{name}.json").write_text(json.dumps(found, indent=1))
