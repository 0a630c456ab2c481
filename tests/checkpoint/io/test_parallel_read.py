"""Threads that read into tensors on a GPU work on the stream of the program. The GPU is pretended."""

import contextlib
import threading

import pytest
import torch

import trackbed
from trackbed.checkpoint.io import boxes


@pytest.mark.parametrize("count", [10, 8 << 20])
def test_threads_fill_tensors_on_the_stream_that_is_current_where_they_are_loaded(count, monkeypatch, tmp_path):
    tensor, target = torch.randn(count), torch.zeros(count)
    trackbed.save({"w": trackbed.ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "checkpoint", direct=False)
    gpu, entered, read = torch.device("cuda", 1), [], []

    @contextlib.contextmanager
    def on_stream(stream):
        entered.append(threading.get_ident())
        assert stream == (gpu, main)
        yield
        entered.remove(threading.get_ident())

    class Stream(tuple):
        """Device and thread. What is behind its copies happens when it is asked for the second time."""

        asked = 0

        def record_event(self):
            return self

        def query(self):
            self.asked += 1
            return self.asked == 2

    streams = []

    def current_stream(device):
        streams.append(Stream((device, threading.get_ident())))
        return streams[-1]

    main = threading.get_ident()
    monkeypatch.setattr(boxes, "_gpus_of", lambda places: {gpu})
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    read_box = boxes.BoxReader.read_box

    def noted(self, *arguments):
        read.append(threading.get_ident() in entered)
        read_box(self, *arguments)

    monkeypatch.setattr(boxes.BoxReader, "read_box", noted)
    trackbed.load({"w": trackbed.ShardedTensor.from_rank_offsets("w", target)}, tmp_path / "checkpoint")
    assert torch.equal(tensor, target)
    assert read
    assert all(read)
    # Once the function has returned, other streams may read the tensors, too.
    assert [stream.asked for stream in streams] == [2]
