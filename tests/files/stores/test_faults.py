"""Faults on the way to a store: the right bytes, or in time an error that names address and reason."""

import random
from itertools import count

import numpy as np
import pytest

from tests.support.stores.servers import Proxy, seconds_of
from trackbed.errors import StoreError
from trackbed.files.stores import ObjectRange, fetch, fetch_heads, fetch_to_file, stamp_of_object

SIZE = 100_000
FAULTS = (403, 404, 500, 502, 503, 429, "reset", "reset body", "stall", "stall body", "cut", "overlong", "range", "tag")
REASONS = (
    "found: status",
    "found another one",
    "no such object",
    "must answer in time (TRACKBED_STORE_TIMEOUT), found: ",
)
ATTEMPT_SECONDS = 0.2
TIMEOUT_SECONDS = 4 * ATTEMPT_SECONDS


class Run:
    """One call with faults, and one without."""

    def __init__(self, seed, bucket, proxy, path):
        self.random, self.bucket, self.proxy, self.path = random.Random(seed), bucket, proxy, path
        self.data = [np.random.default_rng([seed, number]).bytes(SIZE) for number in range(3)]
        self.addresses = [bucket.put(f"{seed}/{number}", raw) for number, raw in enumerate(self.data)]
        self.stamps = [stamp_of_object(address) for address in self.addresses]
        self.replaced = None
        self.is_replaced_in_flight = False

    def ranges(self):
        for _ in range(self.random.randint(1, 12)):
            number = self.random.randrange(3)
            start, stop = sorted(self.random.randrange(SIZE + 1) for _ in range(2))
            yield number, ObjectRange(self.addresses[number], self.stamps[number], start, stop)

    def fetch(self):
        wanted = list(self.ranges())
        for raw, (number, one) in zip(fetch([one for _, one in wanted]), wanted, strict=True):
            assert raw == self.data[number][one.start : one.stop]
        is_old = self.replaced is None or self.is_replaced_in_flight
        assert is_old or all(one.start == one.stop for n, one in wanted if n == self.replaced)

    def heads(self):
        for number, found in enumerate(fetch_heads(self.addresses, 4096)):
            if isinstance(found, Exception):
                raise found
            is_new = number == self.replaced and (not self.is_replaced_in_flight or found[0] != self.stamps[number])
            assert is_new or found[0] == self.stamps[number]
            assert found[1] == (self.data[number][::-1] if is_new else self.data[number])[:4096]

    def whole(self):
        with self.path.open("wb") as file:
            fetch_to_file(self.addresses[0], self.stamps[0], file.fileno())
        assert self.path.read_bytes() == self.data[0]
        assert self.replaced != 0 or self.is_replaced_in_flight

    def replace(self, number):
        self.bucket.put(self.addresses[number].key, self.data[number][::-1])
        self.replaced = number

    def replace_in_flight(self):
        """Has the proxy replace an object when the second request, or a later one, has arrived."""
        self.is_replaced_in_flight = True
        number, left = self.random.randrange(3), count(-self.random.randint(1, 4))
        self.proxy.look = lambda _headers: self.replace(number) if next(left) == 0 else None

    def check(self):
        call = self.random.choice([self.fetch, self.fetch, self.heads, self.whole])
        draw = self.random.random()
        if draw < 0.1:
            self.replace(self.random.randrange(3))
        elif draw < 0.25:
            self.replace_in_flight()
        else:
            # A stamp is what a server says, so that another tag shows only later.
            known = [fault for fault in FAULTS if fault != "tag" or call != self.heads]
            kinds = [None, *self.random.choices(known, k=3)]
            self.proxy.faults[:] = self.random.choices(kinds, k=self.random.randint(1, 25))
        found, seconds = seconds_of(call)
        self.proxy.faults.clear()
        self.proxy.look = lambda _headers: None
        assert seconds < TIMEOUT_SECONDS + 1
        if found is not None:
            assert isinstance(found, (StoreError, FileNotFoundError)), found
            assert any(one.text in str(found) for one in self.addresses)
            assert any(reason in str(found) for reason in REASONS), found
        if self.is_replaced_in_flight and self.replaced is not None:
            return f"in flight: {type(found).__name__}"
        return type(found).__name__

    def read_on(self):
        """Without faults: the old objects, errors for one that was replaced, and the new one after it is opened."""
        for number, (address, stamp) in enumerate(zip(self.addresses, self.stamps, strict=True)):
            if number == self.replaced:
                with pytest.raises(StoreError, match="must be the one that was opened"):
                    fetch([ObjectRange(address, stamp, 5, 500)])
                assert fetch([ObjectRange(address, stamp_of_object(address), 5, 500)]) == [
                    self.data[number][::-1][5:500]
                ]
            else:
                assert fetch([ObjectRange(address, stamp, 5, 500)]) == [self.data[number][5:500]]


def run_all(seeds, bucket, monkeypatch, path):
    proxy = Proxy(bucket.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "20")
    proxy.stall_seconds = 3
    counts = {}
    for seed in seeds:
        run = Run(seed, bucket, proxy, path)
        monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", str(TIMEOUT_SECONDS))
        outcome = run.check()
        monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "20")
        run.read_on()
        counts[outcome] = counts.get(outcome, 0) + 1
    proxy.close()
    assert counts["NoneType"] > len(seeds) / 10  # most calls succeed in the end
    assert counts["StoreError"] > 0
    assert {"in flight: NoneType", "in flight: ReplacedError"} & counts.keys()


def test_faults(bucket, monkeypatch, tmp_path):
    run_all(range(30), bucket, monkeypatch, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_a_thousand_faults(first, bucket, monkeypatch, tmp_path):
    run_all(range(first, first + 250), bucket, monkeypatch, tmp_path / "whole")


@pytest.mark.slow
def test_faults_before_radosgw(ceph_bucket, monkeypatch, tmp_path):
    run_all(range(100), ceph_bucket, monkeypatch, tmp_path / "whole")
