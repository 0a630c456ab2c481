"""One rank of a build that goes wrong: `fault_rank.py REQUEST`, in a folder that shows the data as this rank sees it.

REQUEST is JSON: the arguments of the build, and what the rank `who` does at which `moment`. What became of the rank is
written as lines of JSON.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.files.blends import BlendedMegatronDatasetBuilder, GPTDataset, gpt_config
from trackbed.builder import builder
from trackbed.comm.launch import group_from_environment
from trackbed.index.legacy_random import clear_shuffle_cache


def report(**found):
    print(json.dumps(found), flush=True)


class Fault:
    """What goes wrong on one rank, and when."""

    def __init__(self, *, mode, moment, seconds):
        self.mode = mode
        self.moment = moment
        self.seconds = seconds

    def wants(self):
        """Called before this rank has looked at anything."""
        report(failed=time.time())
        if self.mode == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        self.at("before")
        if self.moment == "some time" and self.mode == "raise":
            # In the main thread, wherever that is then.
            signal.signal(signal.SIGALRM, lambda *_: self.happen())
            signal.setitimer(signal.ITIMER_REAL, self.seconds + 0.001)
        elif self.moment == "some time":
            timer = threading.Timer(self.seconds, self.happen)
            timer.daemon = True
            timer.start()
        return True

    def progress(self, done, total, share):
        """Called when this rank has built an index."""
        if done == 1:
            self.at("during")

    def forget(self):
        """Called when this rank has built what it builds, and others may still be building."""
        self.at("after")
        clear_shuffle_cache()

    def at(self, moment):
        """Let it happen, if this is the moment."""
        if moment == self.moment:
            self.happen()

    def happen(self):
        report(failed=time.time())
        if self.mode == "raise":
            raise ValueError("it broke")
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.mode == "hang":
            os.mkfifo("pipe")
            os.open("pipe", os.O_RDONLY)  # until somebody writes to it


def build(asked, group):
    fault = None
    if group.rank == asked["who"]:
        fault = Fault(mode=asked["mode"], moment=asked["moment"], seconds=asked["seconds"])
        builder.clear_shuffle_cache = fault.forget
    config = gpt_config(
        Path("cache"),
        blend=(asked["prefixes"], asked["weights"]),
        split=asked["split"],
        num_dataset_builder_threads=asked["threads"],
    )
    wants = fault.wants if fault else lambda: True
    progress = fault.progress if fault else None
    BlendedMegatronDatasetBuilder(GPTDataset, asked["sizes"], wants, config, group=group, progress=progress).build()


def main():
    asked = json.loads(sys.argv[1])
    # All have started, however slowly. Rank 0 may be stopped before the others have read that from its store.
    group_from_environment(30).barrier()
    group = group_from_environment(asked["timeout"])
    try:
        build(asked, group)
    except Exception as error:
        report(raised=f"{type(error).__name__}: {error}", at=time.time(), cause=repr(error.__cause__))
    else:
        report(raised=None)


if __name__ == "__main__":
    main()
