import logging

import numpy as np
import pytest

from trackbed.errors import ArgumentError, FormatError
from trackbed.kernels import reference
from trackbed.megatron import functions as helpers


def test_blending_fills_the_first_places():
    datasets, samples = np.full(6, -1, dtype=np.int16), np.full(6, -1, dtype=np.int64)
    helpers.build_blending_indices(datasets, samples, [0.5, 0.25, 0.25], 3, 4, True)
    assert datasets.tolist() == [0, 1, 2, 0, -1, -1]
    assert samples.tolist() == [0, 0, 0, 1, -1, -1]


def test_exhaustive_blending_draws_every_sample():
    datasets, samples = np.empty(5, dtype=np.int16), np.empty(5, dtype=np.int64)
    helpers.build_exhaustive_blending_indices(datasets, samples, [3, 2], 2)
    assert (datasets == reference.exhaustive_blend(np.array([3, 2]))[0]).all()


def test_outputs_that_are_too_short_are_refused():
    with pytest.raises(ArgumentError, match=r"size must be in \[0, 2\]"):
        helpers.build_blending_indices(np.empty(2, np.int16), np.empty(3, np.int64), [1.0], 1, 3, False)
    with pytest.raises(ArgumentError, match="weights must have num_datasets = 2 entries, found 1"):
        helpers.build_blending_indices(np.empty(2, np.int16), np.empty(2, np.int64), [1.0], 2, 2, False)


def test_a_sample_index_has_the_type_that_is_asked_for():
    arguments = (np.array([5, 9], dtype=np.int32), np.array([1, 0], dtype=np.int32), 4, 1, 14)
    rows = helpers.build_sample_idx(*arguments)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[0, 0], [0, 4], [0, 8], [1, 3]]
    assert helpers.build_sample_idx_int64(*arguments, True, 1).dtype == np.int64
    assert helpers.build_sample_idx_int32(*arguments, True, 0).tolist()[-1] == [1, 3]


def test_one_rank_logs(caplog):
    logger = logging.getLogger("a job")
    with caplog.at_level(logging.INFO):
        helpers.log_single_rank(logger, logging.INFO, "from %s", "rank 0")
        helpers.log_single_rank(logger, logging.INFO, "from rank 1 too", rank=1)
    assert caplog.messages[0] == "from rank 0"


def test_an_index_reader_checks_the_counts_it_is_given(pair):
    assert helpers.open_index(str(pair.idx), False).sequence_count == 3
    with pytest.raises(ArgumentError, match=r"\(4, 4\) sequences and document borders, found \(3, 3\)"):
        helpers.open_index(str(pair.idx), False, (4, 4))
    pair.idx.write_bytes(b"nothing")
    with pytest.raises(FormatError):
        helpers.open_index(str(pair.idx), False)
