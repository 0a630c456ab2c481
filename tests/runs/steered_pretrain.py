"""`examples/pretrain_gpt.py` with a change of weights by the program: its arguments, then step, weights and ramp."""

import json
import sys
from functools import partial
from pathlib import Path

import trackbed

OPEN_RUN = trackbed.open_run


def open_steered(step, weights, ramp, *arguments, **options):
    run = OPEN_RUN(*arguments, **options)
    run.set_weights(step, weights, ramp_samples=ramp)
    return run


def main():
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import pretrain_gpt

    *sys.argv, step, weights, ramp = sys.argv
    trackbed.open_run = partial(open_steered, int(step), json.loads(weights), int(ramp))
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
