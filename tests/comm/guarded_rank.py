"""One rank of a job that a stranger attacks: `guarded_rank.py TURNS TIMEOUT SECRET`. Writes a line of JSON.

It checks every value that a collective returns, and reports "wrong" if one is not what the ranks brought.
"""

import contextlib
import json
import sys
import time

from trackbed.comm.launch import group_from_environment
from trackbed.errors import CollectiveError


class WrongValueError(Exception):
    pass


def expect(found, wanted):
    if found != wanted:
        raise WrongValueError(f"{found!r} instead of {wanted!r}")


def turn(group, number):
    """Runs one collective of every kind, with values that are unique to this turn."""
    ranks = range(group.size)
    expect(group.all_gather([number, group.rank]), [[number, rank] for rank in ranks])
    expect(
        group.broadcast(f"{number} of {group.rank}", source=number % group.size), f"{number} of {number % group.size}"
    )
    is_done = False
    with group.guarded(f"turn {number}") as step:
        take, taken = group.counter("parts"), []
        for _ in range(5):
            step.poll(0)
            taken.append(take())
            time.sleep(0.002)
        expect(group.combine(taken, lambda every: sorted(sum(every, []))), list(range(5 * group.size)))
        is_done = True
    expect(is_done, True)  # else the step succeeded though its block did not
    group.agree("the turn", number)


def main():
    turns, timeout, secret = sys.argv[1:]
    group = group_from_environment(float(timeout), secret=secret.encode() or None)
    print(json.dumps({"rank": group.rank}), flush=True)
    report = {"raised": None}
    began = time.time()
    try:
        for number in range(int(turns)):
            turn(group, number)
            report["turns"] = number + 1
    except CollectiveError as error:
        report["raised"] = str(error)
    except WrongValueError as error:
        report["wrong"] = str(error)
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({**report, "seconds": time.time() - began, "at": time.time()}), flush=True)


if __name__ == "__main__":
    main()
