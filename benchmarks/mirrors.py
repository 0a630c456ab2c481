"""`python -m benchmarks.mirrors`: how much slower training is whose checkpoints are copied to a store with troubles.

One process trains, and saves a checkpoint of 100 MB each interval. Blocks of ten intervals whose checkpoints are copied
to an S3 server take turns with blocks without a mirror. The server is the one that `AWS_ENDPOINT_URL` names, on the
same processors, behind a link that in turn works, is down, lets 20 MB a second pass, loses answers, and works again.
"""

import argparse
import asyncio
import logging
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import torch

from benchmarks.harness import machine
from trackbed import Checkpointer, sharded_state
from trackbed.checkpoint.damage import find_damage

BUCKET: Final = "trackbed-mirrors"
INTERVALS: Final = 10
TROUBLES: Final = ("none", "down", "slow", "lost answers", "none")
SLOW_BYTES: Final = 20 << 20
"""Bytes that pass in a second through a slow link."""
LAST_TROUBLE: Final = max(i for i in range(INTERVALS) if TROUBLES[i * len(TROUBLES) // INTERVALS] != "none")
PIECE_BYTES: Final = 1 << 20


class Link:
    """Passes bytes on to a server, with troubles that another process chooses.

    Args:
        target: host and port of the server.
        orders: brings the name of the trouble that begins.
    """

    def __init__(self, target: tuple[str, int], orders: Connection) -> None:
        self._target = target
        self._orders = orders
        self._trouble = "none"
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self) -> None:
        """Says its port, and works until the other end of its orders is closed."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self._orders.send(server.sockets[0].getsockname()[1])
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def obey() -> None:
            try:
                self._trouble = self._orders.recv()
            except EOFError:
                loop.remove_reader(self._orders.fileno())
                ended.set()
            if self._trouble == "down":
                for writer in self._open:
                    writer.transport.abort()

        loop.add_reader(self._orders.fileno(), obey)
        await ended.wait()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._trouble == "down":
            writer.transport.abort()
            return
        answers, requests = await asyncio.open_connection(*self._target)
        self._open |= {writer, requests}
        try:
            await asyncio.gather(self._pass(reader, requests), self._pass(answers, writer, is_answer=True))
        except (OSError, asyncio.CancelledError):  # at the end the loop ends the connections that are open
            pass
        finally:
            self._open -= {writer, requests}
            for one in (writer, requests):
                one.transport.abort()

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        while data := await source.read(PIECE_BYTES):
            if is_answer and self._trouble == "lost answers":
                target.transport.abort()
                return
            if self._trouble == "slow":
                await asyncio.sleep(len(data) / SLOW_BYTES)
            target.write(data)
            await target.drain()
        target.close()


def serve(target: tuple[str, int], orders: Connection) -> None:
    """Runs a link, in a process of its own, which takes no core from training: it stands for a network."""
    os.nice(19)
    asyncio.run(Link(target, orders).serve())


@contextmanager
def link_to(endpoint: str) -> Iterator[Callable[[str], None]]:
    """Puts a link before the server that the environment names; yields a function that begins a trouble."""
    parts = urlsplit(endpoint)
    orders, others = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve, args=((parts.hostname, parts.port), others), daemon=True)
    process.start()
    others.close()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{orders.recv()}"
    try:
        yield orders.send
    finally:
        orders.close()
        process.join()
        os.environ["AWS_ENDPOINT_URL"] = endpoint


class Training:
    """A model and its optimizer, of 100 MB."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1320, 1320) for _ in range(5)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()

    def step(self) -> None:
        """Makes a step."""
        (self.model(torch.ones(64, 1320)) - 1).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(
        self, checkpointer: Checkpointer, first: int, steps: int, begin: Callable[[int], None]
    ) -> tuple[list[float], float]:
        """Makes the steps of a block.

        Returns:
            Seconds of each step, with that of the call of `save`; and seconds from the end of the troubles until the
            mirror had the newest checkpoint of that moment, or a later one.
        """
        seconds: list[float] = []
        recovered = math.inf
        for interval in range(INTERVALS):
            begin(interval)
            for step in range(steps):
                started = time.perf_counter()
                if step == 0:
                    checkpointer.save(first + interval, sharded_state(self.model, self.optimizer))
                self.step()
                checkpointer.poll()
                seconds.append(time.perf_counter() - started)
                newer = checkpointer.history[-(interval - LAST_TROUBLE + 1) :] if interval > LAST_TROUBLE else []
                if recovered == math.inf and any(record.mirrored_seconds is not None for record in newer):
                    recovered = sum(seconds[(LAST_TROUBLE + 1) * steps :])
        return seconds, recovered


def measure(folder: Path, blocks: int, steps: int) -> None:
    """Prints the times of both kinds of blocks."""
    import boto3

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    mirror = f"s3://{BUCKET}/{int(time.time())}"
    training = Training()
    times: dict[str, list[float]] = {"without": [], "with": []}
    recoveries, damaged = [], 0
    with link_to(endpoint) as begin_trouble:

        def begin(interval: int) -> None:
            begin_trouble(TROUBLES[interval * len(TROUBLES) // INTERVALS])

        with (
            Checkpointer(folder / "without", keep_last=2) as plain,
            Checkpointer(folder / "with", keep_last=2, mirror=mirror) as mirrored,
        ):
            for block in range(blocks + 1):
                first = block * INTERVALS
                without, _ = training.block(plain, first, steps, lambda _: None)
                plain.wait()
                with_mirror, recovered = training.block(mirrored, first, steps, begin)
                mirrored.wait()
                if block:  # the first pays for what begins
                    times["without"] += without
                    times["with"] += with_mirror
                    recoveries.append(recovered)
            mirrored.close()
            num_bytes = mirrored.history[-1].num_bytes
            copied = sum(record.mirrored_seconds is not None for record in mirrored.history)
            for step in range(first + INTERVALS):
                place = f"{mirror}/step-{step:07}"
                found = list(find_damage(place))
                damaged += bool(found) and "must be a distributed checkpoint" not in found[0]
    rows = [
        ("medians", statistics.median),
        ("means", statistics.mean),
        ("99th of 100", lambda t: sorted(t)[-len(t) // 100]),
    ]
    print(f"{blocks * INTERVALS} checkpoints of {num_bytes / 1e6:.0f} MB, one each {steps} steps\n")
    print("| step, ms | without | with a mirror | |\n|---|---:|---:|---:|")
    for name, of in rows:
        without, with_mirror = of(times["without"]) * 1e3, of(times["with"]) * 1e3
        print(f"| {name} | {without:.1f} | {with_mirror:.1f} | {with_mirror / without:.3f} |")
    print(f"\n{copied} of {first + INTERVALS} checkpoints were copied, and {damaged} of these are damaged.")
    print(f"After the troubles, the mirror had the newest after {max(recoveries):.2f} s at most.")


def main() -> int:
    """Measures in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5, help="blocks of each kind that count")
    parser.add_argument("--steps", type=int, default=20, help="steps of an interval")
    parser.add_argument("--folder", help="folder on the disk that is used")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.setdefault("TRACKBED_STORE_TIMEOUT", "5")
    print(f"{machine()}, torch {torch.__version__}, one process of one thread", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.blocks, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
