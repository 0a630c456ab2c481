"""Everything that needs a GPU, in one command: `python tests/gpu/accept.py --out FOLDER`.

Each section is a process with a time limit. `gpu.json` holds every number, with the name of the card, of which
`python -m benchmarks.gpu --table gpu.json` makes tables; the last line counts what passed. It runs on a machine with
torch for CUDA, a C++ compiler and no network; `make gpu-wheels` fetches what such a machine usually lacks. `--dry`
rehearses all of it on the CPU, at a thousandth of the size.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".gpu-site"
SECTIONS = {
    "install": (["install"], 150),
    "one-rank": (["one_rank"], 200),
    "two-ranks-gloo": (["two_ranks", "gloo"], 120),
    "two-ranks-nccl": (["two_ranks", "nccl"], 120),
    "steps": (["steps"], 90),
    "overlap": (["overlap"], 40),
    "loader": (["loader"], 60),
    "checkpoints": (["checkpoints"], 85),
}
"""Module and arguments of each section, and its limit in seconds."""


def run(name: str, out: Path, *, is_dry: bool) -> dict:
    """Runs a section. Returns what it has found."""
    words, seconds = SECTIONS[name]
    path = os.pathsep.join(map(str, (SITE, ROOT)))
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if is_dry:
        environment["TRACKBED_GPU_DRY"] = "1"
    result = out / f"{'_'.join(words)}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"tests.gpu.sections.{words[0]}", *words[1:], "--out", str(out)]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    if not result.exists():
        return {"seconds": 0.0, "passed": [], "failed": {name: tail_of(out / f"{name}.log")}, "not_run": {}}
    found = json.loads(result.read_text())
    if process.returncode:
        found["failed"][f"{name}: exit status {process.returncode}"] = tail_of(out / f"{name}.log")
    return found


def in_short(found: dict) -> dict:
    """What a section has found, as numbers and first lines; the whole text is in its own file."""
    figures = {name: value for name, value in found.get("figures", {}).items() if not name.endswith(", seconds")}
    reasons = {
        kind: {name: (why.strip().splitlines() or [""])[0][:200] for name, why in found[kind].items()}
        for kind in ("failed", "not_run")
    }
    return {"seconds": round(found["seconds"], 1), "passed": len(found["passed"]), **reasons, "figures": figures}


def tail_of(path: Path) -> str:
    """The end of a log."""
    return path.read_text(errors="replace")[-1500:]


def commit() -> str:
    """The commit of this folder, as far as it is known."""
    found = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def what_lacks() -> str:
    """Why this Python cannot use a GPU; empty if it can."""
    probe = "import torch; print('' if torch.cuda.is_available() else f'torch {torch.__version__} finds none')"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    return (found.stdout if found.returncode == 0 else found.stderr).strip().rpartition("\n")[2]


def main() -> int:
    """Runs the sections, and prints the table. Returns 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json and the logs")
    parser.add_argument("--only", help=f"sections, separated by commas: {', '.join(SECTIONS)}")
    parser.add_argument("--dry", action="store_true", help="rehearse on the CPU")
    arguments = parser.parse_args()
    rehearsed = [name for name in SECTIONS if name != "two-ranks-nccl"]  # gloo stands for NCCL there
    names = arguments.only.split(",") if arguments.only else rehearsed if arguments.dry else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: must name sections of {', '.join(SECTIONS)}, found {', '.join(unknown)}")
    if not arguments.dry and (why := what_lacks()):
        parser.exit(2, f"gpu: {sys.executable} must have torch for CUDA and a GPU: {why}; --dry needs neither\n")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu.json"
    all_of_it = json.loads(path.read_text()) if path.exists() else {"sections": {}}
    all_of_it |= {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "is_dry": arguments.dry}
    counts = {"passed": 0, "failed": 0, "not_run": 0}
    print(f"{'section':<16}{'seconds':>8}{'passed':>8}{'failed':>8}{'not run':>9}", flush=True)
    for name in names:
        found = run(name, out, is_dry=arguments.dry)
        all_of_it["sections"][name] = in_short(found)
        path.write_text(json.dumps(all_of_it, indent=1))
        for kind in counts:
            counts[kind] += len(found[kind])
        numbers = [len(found[kind]) for kind in counts]
        print(f"{name:<16}{found['seconds']:8.0f}{numbers[0]:8}{numbers[1]:8}{numbers[2]:9}", flush=True)
        for check, why in found["failed"].items():
            print(f"  FAILED {check}: {why}", flush=True)
        for check, why in found["not_run"].items():
            print(f"  not run: {check}: {why.splitlines()[0] if why else ''}", flush=True)
        for figure, value in found.get("figures", {}).items():
            if isinstance(value, dict) and "is_met" in value:
                mark = "ok" if value["is_met"] else "FELL SHORT"
                print(f"  {figure:<58}{value['value']:>10.4g}  {value['wanted']:<10} {mark}", flush=True)
            elif isinstance(value, (str, int, float)) and "rank" not in figure:
                print(f"  {figure:<58}{value if isinstance(value, str) else format(value, '.4g'):>10}", flush=True)
    print(f"gpu: {counts['passed']} passed, {counts['failed']} failed, {counts['not_run']} skipped")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
