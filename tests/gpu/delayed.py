"""Collectives of one rank that end late, as those of a network do, on a stream of their own.

Until an operation ends, what it will write is NaN: whoever reads too early sees that, and what is written in between is
lost. So training with them has the right numbers only if everything is waited for.
"""

import threading
import time

import torch

from tests.gpu.card import sleep
from trackbed.grads.collectives import DONE
from trackbed.grads.collectives.protocol import NO_LABEL, exchange_of_one


class DelayedCollectives:
    """See `trackbed.grads.collectives.Collectives`.

    Args:
        seconds: time that each operation takes.
        seconds_per_byte: further time for each byte of its buffers, as over a link.
        waits: False for works that are not waited for, with which a test must fail.
    """

    def __init__(self, seconds, *, seconds_per_byte=0.0, waits=True):
        self.seconds = seconds
        self.seconds_per_byte = seconds_per_byte
        self.waits = waits
        self.count = 0
        self._stream = None

    def rank(self):
        return 0

    def size(self):
        return 1

    def num_issued(self):
        return self.count

    def all_reduce(self, buffers, *, scale, average, label):
        for buffer in buffers:
            buffer *= scale
        return self._delayed(buffers)

    def reduce_scatter(self, buffers, *, scale, average, label):
        return self.all_reduce(buffers, scale=scale, average=average, label=label)

    def all_gather(self, buffers, *, label):
        return self._delayed(buffers)

    def exchange(self, numbers, *, label=NO_LABEL, more=None):
        return exchange_of_one(numbers, more)

    def broadcast(self, tensors, *, source):
        return DONE

    def _delayed(self, buffers):
        self.count += 1
        begin = self._on_stream if buffers[0].is_cuda else self._on_thread
        # A change that counts as one of the program would be refused.
        return _Checked(begin([buffer.data for buffer in buffers]), waits=self.waits)

    def _seconds_of(self, buffers):
        return self.seconds + self.seconds_per_byte * sum(buffer.nbytes for buffer in buffers)

    def _on_stream(self, buffers):
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [buffer.clone() for buffer in buffers]
            for buffer in buffers:
                buffer.fill_(float("nan"))
            sleep(self._seconds_of(buffers))
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)
        return _OnStream(self._stream.record_event())

    def _on_thread(self, buffers):
        copies = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            buffer.fill_(float("nan"))

        def end():
            time.sleep(self._seconds_of(buffers))
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    buffer.copy_(copy)

        thread = threading.Thread(target=end)
        thread.start()
        return _OnThread(thread)


class _OnStream:
    def __init__(self, event):
        self._event = event

    def wait(self, seconds=None):
        torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_done(self):
        return self._event.query()

    def on_done(self, call):
        self._event.synchronize()
        call()


class _OnThread:
    def __init__(self, thread):
        self._thread = thread

    def wait(self, seconds=None):
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def is_done(self):
        return not self._thread.is_alive()

    def on_done(self, call):
        threading.Thread(target=lambda: (self._thread.join(), call())).start()


class _Checked:
    """A work that is waited for, or is said to have been."""

    def __init__(self, work, *, waits):
        self._work = work
        self._waits = waits

    def wait(self, seconds=None):
        return self._work.wait(seconds) if self._waits else True

    def is_done(self):
        return self._work.is_done() if self._waits else True

    def on_done(self, call):
        self._work.on_done(call)

    def late_ranks(self):
        return []
