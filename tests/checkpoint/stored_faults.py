"""Trials of saves and loads in an object store that come to harm: `stored_faults.py ENDPOINT COUNT SEED`.

In each trial processes save to one address, or load from it, and something happens: answers of the store are errors,
late, cut or lost, a process is killed, two save at once, objects are removed, a listing lacks what is new. Afterwards
the address has the checkpoint of before, or a new one, whole. Prints a line of JSON with what is wrong.

Processes are forked from this one, which has imported everything but the client of the store.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.stores.servers import ACCESS_KEY, SECRET_KEY, Proxy, S3Bucket
from trackbed.checkpoint import ShardedTensor, load, save
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.io import object_writer
from trackbed.checkpoint.leftovers import find_leftovers, remove_leftover
from trackbed.checkpoint.stored_save import StoredSave
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError, StoreError

OBJECT_BYTES = 64 << 10
STORE_SECONDS = 2.0
GROUP_SECONDS = 4.0
FAULTS = (500, 503, 429, 403, "reset", "reset body", "cut", "stall", "lost answer", "late listing")
KINDS = ("fault", "fault", "fault", "kill", "kill", "two", "read", "remove", "one rank")


def rows_of(value, rank, size):
    return torch.full((20_000 // size, 4), float(value)) + torch.arange(4)


def state_of(value, rank=0, size=1):
    rows = ShardedTensor.from_rank_offsets("rows", rows_of(value, rank, size), (0, rank, size))
    return {"rows": rows, "step": value}


def value_at(address, *, may_be_damaged=False):
    """Value of the checkpoint at an address, which must be whole; None if there is none."""
    try:
        found = load({"rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(20_000, 4))}, address, group=SOLO)
    except CheckpointError as error:
        if "must be a distributed checkpoint" in str(error):
            return None
        raise
    value = found["step"]
    if not torch.equal(found["rows"], rows_of(value, 0, 1)):
        raise ValueError(f"{address}: the tensor must be of save {value}, but is of another")
    damage = list(find_damage(address))
    if damage and (may_be_damaged or "since: verify it again" in damage[0]):
        raise CheckpointError(damage[0])
    if damage:
        raise ValueError(f"{address}: {damage}")
    return value


class Fork:
    """A process that runs a function, and says in a file what came of it."""

    def __init__(self, function, folder):
        self.path = Path(folder) / f"{time.monotonic_ns()}"
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                self.write(["ok", function()])
                status = 0
            except (CheckpointError, StoreError) as error:
                self.write(["error", str(error)])
                status = 0
            except BaseException:
                self.write(["wrong", traceback.format_exc()])
            finally:
                os._exit(status)

    def write(self, found):
        # A kill leaves the whole file or none.
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(self.path)

    def join(self, seconds=30.0):
        """What came of it; None if it was killed. Raises if it goes on."""
        deadline = self.started + seconds
        while True:
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"a process must end within {seconds:g} s, but does not")
            time.sleep(0.005)
        return json.loads(self.path.read_text()) if self.path.exists() else None

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


class Trials:
    """Trials at one address."""

    def __init__(self, bucket, proxy, folder, seed):
        self.bucket, self.proxy, self.folder = bucket, proxy, folder
        self.draw = random.Random(seed)
        self.address = bucket.text("run/step-1")
        self.value = None
        self.last = 0

    def next_value(self):
        self.last += 1
        return self.last

    def fork(self, function, *arguments):
        return Fork(lambda: function(*arguments), self.folder)

    def saved(self, value):
        return self.fork(lambda: save(state_of(value), self.address, group=SOLO))

    def run(self, kind):
        """Runs a trial. Returns what may be there afterwards."""
        return getattr(self, f"_{kind.replace(' ', '_')}")()

    def _fault(self):
        value = self.next_value()
        before = [None] * self.draw.randrange(20)
        self.proxy.faults = before + [self.draw.choice(FAULTS)] * self.draw.choice([1, 1, 2, 50])
        found = self.saved(value).join(6 * STORE_SECONDS)
        self.proxy.faults = []
        if found[0] == "ok":
            return {value}
        self.check_error(found)
        return {self.value, value}

    def _kill(self):
        value = self.next_value()
        self.proxy.delay_seconds = 0.01
        process = self.saved(value)
        time.sleep(self.draw.random() * 0.6)
        process.kill()
        found = process.join()
        self.proxy.delay_seconds = 0.0
        return {value} if found is not None and found[0] == "ok" else {self.value, value}

    def _two(self):
        values = [self.next_value(), self.next_value()]
        found = [process.join() for process in [self.saved(value) for value in values]]
        for one in found:
            if one[0] != "ok":
                self.check_error(one)
        return {value for value, one in zip(values, found, strict=True) if one[0] == "ok"} | {self.value}

    def _read(self):
        value = self.next_value()
        readers = [self.fork(value_at, self.address) for _ in range(2)]
        time.sleep(self.draw.random() * 0.1)
        writer = self.saved(value)
        for reader in readers:
            kind, found = reader.join()
            if kind == "ok" and found not in (self.value, value):
                raise ValueError(f"a reader must find {self.value} or {value}, but finds {found}")
            if kind != "ok":
                self.check_error((kind, found))
        self.require_ok(writer.join())
        return {value}

    def _remove(self):
        """An object is removed or changed while a checkpoint is read: an error that names it, or the values."""
        if self.value is None:
            return {None}
        names = [key for key in list(self.bucket.keys()) if "__0_" in key]
        reader = self.fork(lambda: value_at(self.address, may_be_damaged=True))
        time.sleep(self.draw.random() * 0.05)
        for name in names[:1]:
            self.bucket.delete(name) if self.draw.random() < 0.5 else self.bucket.put(name, b"x" * 70_000)
        kind, found = reader.join()
        if kind != "ok":
            self.check_error((kind, found))
        elif found != self.value:
            raise ValueError(f"a reader must find {self.value}, but finds {found}")
        value = self.next_value()
        self.require_ok(self.saved(value).join())
        return {value}

    def _one_rank(self):
        """One of two ranks is killed: the other one is told in time."""
        value, port_file = self.next_value(), Path(self.folder) / f"store{self.last}"

        def work(rank):
            timeout = timedelta(seconds=GROUP_SECONDS)
            dist.init_process_group("gloo", f"file://{port_file}", timeout, world_size=2, rank=rank)
            started = time.monotonic()
            try:
                save(state_of(value, rank, 2), self.address)
            except CheckpointError as error:
                return [time.monotonic() - started, str(error)]
            return [time.monotonic() - started, ""]

        self.proxy.delay_seconds = 0.01
        ranks = [self.fork(work, rank) for rank in range(2)]
        who = self.draw.randrange(2)
        time.sleep(0.2 + self.draw.random() * 0.8)
        ranks[who].kill()
        found = [rank.join(40) for rank in ranks]
        self.proxy.delay_seconds = 0.0
        other = found[1 - who]
        if other is None or other[0] != "ok":
            raise ValueError(f"the other rank must be told, but: {other}")
        seconds, text = other[1]
        if seconds > GROUP_SECONDS * 1.2 + 2 * STORE_SECONDS:
            raise ValueError(f"the other rank must be told in time, but was after {seconds:.1f} s: {text}")
        return {self.value, value}

    def check_error(self, found):
        kind, text = found
        if kind != "error" or self.bucket.name not in text or SECRET_KEY in text:
            raise ValueError(f"an error must name the address, and no secret, but: {kind} {text}")

    @staticmethod
    def require_ok(found):
        if found is None or found[0] != "ok":
            raise ValueError(f"must succeed, but: {found}")

    def check(self, allowed):
        """Checks what is there, and that everything else is listed as left over."""
        kind, found = self.fork(value_at, self.address).join()
        if kind != "ok" or found not in allowed:
            raise ValueError(f"must be one of {allowed}, but is {found}")
        self.value = found
        # Before what is known: a request of a process that was killed may arrive late.
        ids = {key.split("/")[2] for key in list(self.bucket.keys()) if key.count("/") == 3}
        known = self.fork(self._known).join()
        self.require_ok(known)
        if not ids <= set(known[1]):
            raise ValueError(f"objects must be of the checkpoint or listed, but {ids - set(known[1])} are not")
        if self.draw.random() < 0.05:
            self.require_ok(self.fork(self._clean).join())
            ids = {key.split("/")[2] for key in list(self.bucket.keys()) if key.count("/") == 3}
            if len(ids) != (self.value is not None):
                raise ValueError(f"nothing must be left but the checkpoint, found {ids}")

    def _known(self):
        from trackbed.checkpoint.io.stored_folder import StoredFolder

        current = StoredFolder(self.address).opened().save_id
        return [one.save_id for one in find_leftovers(self.address)] + ([] if current is None else [current])

    def _clean(self):
        for one in find_leftovers(self.address):
            remove_leftover(one)


def main():
    endpoint, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    object_writer.OBJECT_BYTES = StoredSave.most_item_bytes = OBJECT_BYTES
    bucket, proxy = S3Bucket(endpoint), Proxy(endpoint)
    proxy.stall_seconds = 1.5 * STORE_SECONDS
    os.environ |= {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": proxy.url,
        "TRACKBED_STORE_TIMEOUT": str(STORE_SECONDS),
    }
    problems, kinds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(bucket, proxy, folder, seed)
        for number in range(count):
            kind = trials.draw.choice(KINDS)
            kinds[kind] = kinds.get(kind, 0) + 1
            try:
                trials.check(trials.run(kind))
            except Exception:
                proxy.faults, proxy.delay_seconds = [], 0.0
                problems.append(f"trial {number}, {kind}: {traceback.format_exc()}")
                try:
                    trials.value = trials.fork(value_at, trials.address).join()[1]
                except Exception:
                    problems.append(f"after trial {number}: {traceback.format_exc()}")
                    break
    print(json.dumps([problems, kinds]))


if __name__ == "__main__":
    main()
