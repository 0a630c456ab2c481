"""The command line on hostile input: each case in a process of its own, with little memory and little time.

Starting Python for each case would take most of the time, so one process that has imported everything forks for each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESS_BYTES = 3 << 30
"""Besides what the libraries take, which is 7 GiB with torch for CUDA."""
FILE_BYTES = 64 << 20  # so that an index of trillions of samples is refused and not written
SECONDS = 60.0

RUNNER = """
import json, os, resource, signal, sys, time
from pathlib import Path
import torch
from trackbed.cli.main import main
from trackbed.blends import plan_blend
from trackbed.preprocess import preprocess

limits, cases = json.load(sys.stdin)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (limits["address_bytes"] + pages * resource.getpagesize(),) * 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"],) * 2)

def run(case):
    os.setsid()
    os.chdir(case["folder"])
    for number, name in ((0, os.devnull), (1, case["stdout"]), (2, case["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.argv = ["trackbed", *case["arguments"]]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else bool(end.code))

for case in cases:
    child = os.fork()
    if not child:
        try:
            run(case)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(70)
    stop = time.monotonic() + limits["seconds"]
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > stop:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.002)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A command in a folder of its own."""

    folder: Path
    arguments: Sequence[str]
    what: str
    """What is hostile about it."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    case: Case
    code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str | None:
        """Why this is neither a success nor an error in sentences; None if it is one of them."""
        lines = self.stderr.splitlines()
        if self.code not in (0, 1, 2):
            return f"ended with {self.code}"
        if "Traceback" in self.stderr or "RuntimeWarning" in self.stderr:
            return "a traceback or a stray warning"
        errors = [line for line in lines if line.startswith("trackbed: ")]
        if self.code == 1 and not (lines and lines[-1].startswith(("trackbed: ", "Error: "))):
            return "no sentence"
        if len(errors) > 23:  # 20 rows, their number, a hint, and the end
            return f"{len(errors)} lines of errors"
        longest = max(map(len, lines), default=0)
        return f"a line of {longest} characters" if longest > 4_000 else None

    def __str__(self) -> str:
        return f"{self.case.what}\n  {self.case.arguments}\n  {self.complaint}\n  {self.stderr[-800:]}"


def run_cases(cases: Sequence[Case], *, seconds: float = SECONDS) -> list[Outcome]:
    """Runs all cases, one after the other."""
    given = [
        {
            "folder": str(case.folder),
            "arguments": list(case.arguments),
            "stdout": f"{case.folder}.{number}.stdout",
            "stderr": f"{case.folder}.{number}.stderr",
        }
        for number, case in enumerate(cases)
    ]
    limits = {"address_bytes": ADDRESS_BYTES, "file_bytes": FILE_BYTES, "seconds": seconds}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([limits, given]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    codes = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        Outcome(case, code, *(Path(one[name]).read_text(errors="backslashreplace") for name in ("stdout", "stderr")))
        for case, code, one in zip(cases, codes, given, strict=True)
    ]


def check(outcomes: Sequence[Outcome]) -> dict[int, int]:
    """Fails if one of them is neither a success nor an error in sentences. Returns how many ended with each status."""
    wrong = [outcome for outcome in outcomes if outcome.complaint is not None]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n".join(map(str, wrong[:10]))
    return {code: sum(one.code == code for one in outcomes) for code in {one.code for one in outcomes}}
