"""`examples/pretrain_gpt.py` with a change of weights by the program: its arguments, then step, weights and ramp."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pretrain_gpt

import trackbed

step, weights, ramp = int(sys.argv.pop(2)), json.loads(sys.argv.pop(2)), int(sys.argv.pop(2))
open_run = trackbed.open_run


def open_steered(*arguments, **options):
    run = open_run(*arguments, **options)
    run.set_weights(step, weights, ramp_samples=ramp)
    return run


if __name__ == "__main__":
    trackbed.open_run = open_steered
    sys.exit(pretrain_gpt.main())
