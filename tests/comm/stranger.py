"""A process that reaches the ranks' store, knows this source code, and has no secret: `stranger.py PORT MODE`.

It repeats its attack until the store is gone.
"""

import re
import sys
import time
from collections import defaultdict
from datetime import timedelta

import orjson
from torch.distributed import TCPStore

WORDS = "HACKED"
CODE = b"\x5a" * 32
NUM_RENDEZVOUS = 300
ERROR_OUTCOME = orjson.dumps([None, WORDS, True, False])
GOOD_OUTCOME = orjson.dumps([[WORDS], None, False, False])
RECORD = orjson.dumps(["0", 10**9, WORDS, WORDS, True, {}])
OLD_RECORD = orjson.dumps(["0", 10**9, WORDS])
FAILURE = orjson.dumps([1, WORDS])


def matching(store, pattern):
    return [key for key in store.list_keys() if re.search(pattern, key)]


def put_everywhere(*values, pattern="."):
    """Overwrites the keys that match, in each round with the next value."""

    def attack(store, turn):
        for key in matching(store, pattern):
            store.set(key, values[turn % len(values)])

    return attack


def delete_everything(store, _turn):
    for key in store.list_keys():
        store.delete_key(key)


def count(amount, pattern):
    def attack(store, _turn):
        for key in matching(store, pattern):
            store.add(key, amount)

    return attack


def set_flags(store, _turn):
    """Sets the flags of this rendezvous and of the next ones."""
    for key in matching(store, r"rank/0$"):
        for number in range(NUM_RENDEZVOUS):
            store.set(f"{key.removesuffix('rank/0')}{number}/flag", b"")
            store.set(f"{key.removesuffix('rank/0')}{number}.0/flag", b"")


def answer_first(value):
    """Sets the outcomes of the next rendezvous before they open."""

    def attack(store, _turn):
        for key in matching(store, r"rank/0$"):
            for number in range(NUM_RENDEZVOUS):
                store.set(f"{key.removesuffix('rank/0')}{number}/outcome", value)

    return attack


KEPT = defaultdict(list)
COUNTED = set()


def read(store, key):
    return store.compare_set(key, b"\0", b"\0")


def report_failures(store, turn):
    """Reports failures of ranks, with causes, at the next rendezvous."""
    for key in matching(store, r"rank/0$"):
        for number in range(NUM_RENDEZVOUS):
            start = f"{key.removesuffix('rank/0')}{number}"
            store.set(f"{start}/failure/1", FAILURE if turn % 2 else CODE + FAILURE)
            if start not in COUNTED:
                COUNTED.add(start)
                store.add(f"{start}/failures", 1)
                store.add(f"{start}/count", 2**32)


def move(store, turn):
    """Moves the values of one rank or rendezvous to the keys of another."""
    for pattern in (r"rank/\d+$", r"outcome$", r"failure/\d+$"):
        keys = matching(store, pattern)
        values = [read(store, key) for key in keys]
        for key, value in zip(keys, values[1 + turn % 3 :] + values, strict=False):
            store.set(key, value)


def put_back(store, turn):
    """Replays values that a rank wrote earlier."""
    for key in matching(store, r"(rank/\d+|outcome|checks)$"):
        value = read(store, key)
        if value not in KEPT[key]:
            KEPT[key].append(value)
        elif len(KEPT[key]) > 3:
            store.set(key, KEPT[key][turn % 3])


MODES = {
    "look": lambda store, _turn: [read(store, key) for key in store.list_keys()],
    "delete": delete_everything,
    "overwrite": put_everywhere(b"garbage", b"", b"x" * 100),
    "forge outcomes": put_everywhere(
        ERROR_OUTCOME, GOOD_OUTCOME, CODE + ERROR_OUTCOME, CODE + GOOD_OUTCOME, pattern="outcome$"
    ),
    "forge records": put_everywhere(RECORD, OLD_RECORD, CODE + RECORD, CODE + OLD_RECORD, pattern=r"rank/\d+$"),
    "forge failures": report_failures,
    "answer first": answer_first(CODE + GOOD_OUTCOME),
    "answer first with words": answer_first(ERROR_OUTCOME),
    "count": count(1, r"(count|failures|counter/\w+)$"),
    "count down": count(-1, r"(count|failures|counter/\w+)$"),
    "count failures": count(2**32, r"count$"),
    "uncount failures": count(-(2**32), r"count$"),
    "skip numbers": count(1, r"counter/\w+$"),
    "give numbers again": count(-1, r"counter/\w+$"),
    "break counters": put_everywhere(b"no number", pattern=r"(count|counter/\w+)$"),
    "set flags": set_flags,
    "move": move,
    "put back": put_back,
}


def main():
    port, mode = int(sys.argv[1]), sys.argv[2]
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    print("there", flush=True)
    for turn in range(10**9):
        try:
            MODES[mode](store, turn)
        except RuntimeError as error:
            if "stoll" in str(error):
                continue
            break
        time.sleep(0.001)


if __name__ == "__main__":
    main()
