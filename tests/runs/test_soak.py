"""Runs that are ended at random moments train on the samples of a run that is not."""

import pytest

from tests.runs.soak import EVERY, STEPS, Job, soak, write_config, write_data
from trackbed import Checkpointer
from trackbed.comm import SOLO
from trackbed.ledger import read_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of the data, with the record of a run without an end."""
    folder = tmp_path_factory.mktemp("soak")
    write_data(folder)
    job = Job(write_config(folder, "whole", "ddp"), 2)
    assert job.wait() == 0, job.words[-3000:]
    return folder, read_run(folder / "whole")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("parallel", "num_ends"), [("ddp", 10), ("fsdp2", 10)])
def test_each_sample_is_in_one_step_that_counts(whole, parallel, num_ends):
    folder, record = whole
    met = soak(folder, parallel, num_ends, seed=num_ends)
    found = read_run(folder / f"ended-{parallel}")
    assert [line["step"] for line in found.steps] == list(range(1, STEPS + 1)), met
    assert [line["batch_hash"] for line in found.steps] == [line["batch_hash"] for line in record.steps], met
    pairs = zip(found.steps, record.steps, strict=True)
    assert max(abs(ended["loss"] - unbroken["loss"]) for ended, unbroken in pairs) < 1e-3, met
    with Checkpointer(folder / f"ended-{parallel}" / "checkpoints", group=SOLO) as checkpointer:
        assert checkpointer.latest(verified=True) == STEPS
        assert checkpointer.steps()[-2:] == [STEPS - EVERY, STEPS], met
