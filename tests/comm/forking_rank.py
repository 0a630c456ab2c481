"""One rank whose forked child leaves a guarded block: `forking_rank.py`. Writes a line of JSON."""

import contextlib
import json
import os
import sys

from trackbed.comm.launch import group_from_environment


def main():
    group = group_from_environment(10.0)
    with group.guarded("fork") as step:
        step.poll(0)
        child = os.fork()
        if child == 0:
            if group.rank == 0:
                sys.exit(5)
            raise ValueError("error of the child")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        gathered = group.all_gather(group.rank)
    print(json.dumps({"status": status, "gathered": gathered, "again": group.all_gather(group.rank)}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(ValueError):  # of the child
        main()
