"""`python -m benchmarks.gpu [steps] [loader] [checkpoints]`: measurements on one GPU, as a table and as JSON."""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu import checkpoints, loader, steps


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["steps", "loader", "checkpoints"], help="what is measured")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--folder", type=Path, help="folder for the data and checkpoints, by default a temporary one")
    arguments = parser.parse_args()
    found = {"card": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        measures = {
            "steps": steps.measure_all,
            "loader": lambda: loader.measure_all(folder),
            "checkpoints": lambda: checkpoints.measure_all(folder),
        }
        for what in arguments.what:
            found[what] = measures[what]()
            print(json.dumps(found[what], indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
