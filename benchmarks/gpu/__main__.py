"""`python -m benchmarks.gpu [steps] [loader] [checkpoints]`: measurements on one GPU.

`python -m benchmarks.gpu --table gpu.json` needs no GPU: it makes tables of what `make gpu` has written.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import checkpoints, loader, steps


def table_of(found: dict[str, Any]) -> str:
    """Tables in Markdown of the file that `make gpu` writes."""
    machine = found["sections"]["install"]["figures"]
    lines = [
        f"{machine['card']}, PyTorch {machine['torch']}, NCCL {machine['nccl']}, Python {machine['python']}, "
        f"{machine['cores']} cores, commit {found['commit']}, {found['date']}",
        "",
        "| section | passed | failed |",
        "|---|---:|---:|",
    ]
    tested = {name: section for name, section in found["sections"].items() if name != "install"}
    lines += [f"| {name} | {section['passed']} | {len(section['failed'])} |" for name, section in tested.items()]
    lines += ["", "| figure | measured | wanted |", "|---|---:|---:|"]
    for section in found["sections"].values():
        for name, value in section["figures"].items():
            if isinstance(value, dict):
                mark = "" if value["is_met"] else ", falls short"
                lines.append(f"| {name} | {value['value']:.4g} | {value['wanted']}{mark} |")
            elif isinstance(value, int | float) and name not in ("cores", "norm"):
                lines.append(f"| {name} | {value:.4g} | |")
    return "\n".join(lines)


def main() -> None:
    """Measures, and prints what was found; or prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["steps", "loader", "checkpoints"], help="what is measured")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--folder", type=Path, help="folder for the data and checkpoints, by default a temporary one")
    parser.add_argument("--table", type=Path, help="file of `make gpu`, of which tables are printed")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table_of(json.loads(arguments.table.read_text())))
        return
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
