"""Samples of runs whose blend has changed."""

import trackbed
from tests.support.shares import check_shares
from trackbed.ledger import read_run
from trackbed.ledger.steering import with_stages
from trackbed.loading.sample_hashes import digests_of, hash_of_batch


def check_samples(folder, *, num_steps):
    """Checks that all steps have the samples of a run that has had the stages of the last event from the start.

    At every prefix of a stage, each dataset is also within the bounds of its share. Returns the event.
    """
    record = read_run(folder)
    assert [line["step"] for line in record.steps] == list(range(1, num_steps + 1))
    event = [one for one in record.events if one["event"] == "blend"][-1]
    dataset = trackbed.open_blend(folder / event["blend"], tokenizer={"eod": 0, "vocab_size": 1000}).train
    dataset = with_stages(dataset, tuple(map(tuple, event["stages"])))
    stop = 0
    for line in record.steps:
        first, stop = line["first_sample"], line["first_sample"] + line["num_samples"]
        digests = digests_of(dataset.gather(range(first, stop))["tokens"])
        samples = [(number, digests[32 * number : 32 * number + 32]) for number in range(stop - first)]
        assert line["batch_hash"] == hash_of_batch(samples), line["step"]
    check_shares(dataset.order.stages, dataset.order.locate(range(stop))[0])
    return event
