"""The line of a step does not depend on how many ranks share its samples."""

import hashlib
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from trackbed.ledger.share import line_of, mean, share_of
from trackbed.loading.sample_hashes import SampleHashes

LOSSES = st.floats(0, 100, allow_nan=False)


def digest(position):
    return hashlib.sha256(str(position).encode()).digest()


def share(positions, losses, num_ranks, **fields):
    batch = SampleHashes(
        positions, b"".join(map(digest, positions)), [position % 3 for position in positions], num_tokens=8
    )
    return json.loads(json.dumps(share_of([batch], losses, num_ranks, fields)))


@given(
    samples=st.dictionaries(st.integers(0, 2**40), LOSSES, min_size=1, max_size=20),
    owner=st.lists(st.integers(0, 4), min_size=20, max_size=20),
)
def test_any_division_of_the_samples_gives_one_line(samples, owner):
    whole = line_of(3, [share(list(samples), list(samples.values()), 5)])
    parts = [[], [], [], [], []]
    for (position, loss), rank in zip(samples.items(), owner, strict=False):
        parts[rank].append((position, loss))
    divided = line_of(3, [share([one for one, _ in part], [loss for _, loss in part], 5) for part in parts])
    assert divided == whole
    assert whole["batch_hash"] == hashlib.sha256(b"".join(digest(one) for one in sorted(samples))).hexdigest()
    assert (whole["first_sample"], whole["num_samples"]) == (min(samples), len(samples))
    assert whole["loss"] == math.fsum(samples.values()) / len(samples)
    assert sum(tokens for tokens, _ in whole["datasets"].values()) == 8 * len(samples)
    # Ranks of a tensor-parallel group read the same samples, which count once.
    twice = line_of(3, [share(list(samples), list(samples.values()), 5)] * 2)
    assert twice == whole


def test_mean_losses_of_ranks_are_weighted_and_seconds_are_those_of_the_slowest():
    line = line_of(1, [share([0, 1, 2], [1.0], 2, stall_seconds=0.25), share([3], [5.0], 2, stall_seconds=0.5)])
    assert (line["loss"], line["stall_seconds"], line["checkpoint_seconds"]) == (2.0, 0.5, 0.0)
    assert line["datasets"]["0"] == [16, None]


def test_a_loss_that_is_no_number_leaves_the_line_without_one():
    assert line_of(1, [share([0, 1], [1.0, None], 1)])["loss"] is None
    assert line_of(1, [share([0, 1], [None], 2), share([2, 3], [1.0], 2)])["loss"] is None
    empty = line_of(1, [share([], [], 1)])
    assert (empty["first_sample"], empty["num_samples"], empty["loss"], empty["datasets"]) == (None, 0, None, {})
    assert mean([1.7e308, 1.7e308]) == math.inf
