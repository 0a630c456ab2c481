"""A training run whose blend is changed again and again, also while a rank is killed."""

import random
from pathlib import Path

import pytest

from tests.ledger.stages_of_runs import check_samples
from tests.runs.soak import STEPS, Job, end, last_step, write_config, write_data
from tests.support.files.built_pair import build
from tests.support.files.rewrite import rewrite
from trackbed.ledger import read_run

SET = ("200", '{"a": 1, "b": 2}', "160")
"""Arguments of `set_weights`: 160 samples are 20 steps."""


def begin(config, ranks):
    return Job(config, ranks, script=Path(__file__).parent / "steered_pretrain.py", arguments=SET)


def events(config, kind):
    return [one for one in read_run(config.with_suffix("")).events if one["event"] == kind]


def await_event(job, kind, count):
    """Waits until there are so many events of a kind."""
    while len(events(job.config, kind)) < count:
        assert job.await_step(last_step(job.config) + 1), job.words[-3000:]


@pytest.mark.slow
@pytest.mark.dist
def test_a_blend_that_is_changed_under_a_job_has_its_stages_from_the_start(tmp_path):
    write_data(tmp_path)
    build(tmp_path / "c", [[30 + (7 * one + two) % 400 for two in range(90)] + [0] for one in range(60)])
    blend = tmp_path / "blend.toml"
    # Names that do not depend on the folder, and room for what is trained until a change is seen.
    text = blend.read_text().replace('path = "a"', f'path = "{tmp_path}/a"\nname = "a"')
    blend.write_text(text.replace('path = "b"', f'path = "{tmp_path}/b"\nname = "b"'))
    config = write_config(tmp_path, "changed", "ddp")
    job = begin(config, 2)
    assert job.await_step(20)
    rewrite(blend, blend.read_text() + "[[stage]\n")
    await_event(job, "refused", 1)
    good = blend.read_text().replace("[[stage]\n", "")
    rewrite(blend, good + "[[stage]]\nfrom_sample = 0\nramp_samples = 900\nweights = {b = 1}\n")
    await_event(job, "blend", 1)
    rewrite(blend, good + f'[[dataset]]\npath = "{tmp_path}/c"\nname = "c"\nweight = 4\n')
    end(job, "one rank", random.Random(3))
    job.wait()
    job = begin(config, 1)
    assert job.wait() == 0, job.words[-3000:]
    event = check_samples(config.with_suffix(""), num_steps=STEPS)
    assert len(event["datasets"]) == 3
    assert sum(ramp > 0 for _, _, ramp in event["stages"]) >= 1
    assert {len(weights) for _, weights, _ in event["stages"]} == {3}
