"""Tests of file stamps."""

import os

import numpy as np

from trackbed.files import Stamp


def test_an_unsigned_64_bit_inode_fits_an_array_of_stamps(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    fields = list(path.stat())
    fields[1] = 2**64 - 5  # as GlusterFS may number it
    stamp = Stamp.of(os.stat_result(fields, {"st_mtime_ns": 12}))
    assert np.array([stamp], dtype=np.int64).tolist() == [[-5, 7, 12]]
