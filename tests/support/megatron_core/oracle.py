"""Megatron Core in a process of its own, which is ended if it takes too long to answer."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.megatron_core.cases import DEFAULT_TOKENIZER, identity
from tests.support.megatron_core.observe import answer, build, word_piece_tokenizer
from tests.support.megatron_core.release import RELEASE
from trackbed.comm import run_ranks
from trackbed.comm.store_group import StoreGroup
from trackbed.datasets import HuggingFaceTokenizer, MegatronIdentity, NullTokenizer
from trackbed.datasets.megatron_releases import COMPARED_WITH, use_release

START_SECONDS = 120
ANSWER_SECONDS = 4


class Oracle:
    """Asks Megatron Core, and starts it anew if it hangs.

    Args:
        path: folder that its packages are taken from first, or None for this environment's own.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path or "", ROOT)))}
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer, or `error` if it hangs or dies."""
        if self._process is None:
            self._start()
        if request["tokenizer"]["kind"] != "word pieces":
            request = {**request, "tokenizer": {**request["tokenizer"], "identity": identity(request["tokenizer"])}}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=ANSWER_SECONDS)
        except (queue.Empty, BrokenPipeError):
            self.stop()
            return {"error": "hangs"}
        if line is None:
            self.stop()
            return {"error": "died"}
        return json.loads(line)

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        here = Path(__file__).parent
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(here / "observe.py"), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=here,
            env=self._environment,
        )
        threading.Thread(target=self._listen, args=(self._process, self._answers), daemon=True).start()
        ready = self._answers.get(timeout=START_SECONDS)
        if ready is None:
            raise RuntimeError("Megatron Core must start, found that it died")

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: "queue.Queue[str | None]") -> None:
        for line in process.stdout:
            answers.put(line)
        answers.put(None)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextlib.contextmanager
def running(path: Path | None = None) -> Iterator[Oracle]:
    """An oracle for the length of the block."""
    oracle = Oracle(path)
    try:
        yield oracle
    finally:
        oracle.stop()


def ask_trackbed(request: dict[str, Any], *, legacy: bool = False) -> dict[str, Any]:
    """What Trackbed makes of the same request.

    Args:
        request: the question.
        legacy: whether the tokenizer is to be taken for one of core 0.10, else of 0.16.1.
    """
    with _following_the_release():
        return answer(request, _tokenizer(request["tokenizer"], legacy=legacy), "trackbed.megatron.core")


@contextlib.contextmanager
def _following_the_release():
    """Defaults are those of the release that is installed."""
    use_release(RELEASE)
    try:
        yield
    finally:
        use_release(COMPARED_WITH[0])


def ask_ranks(request: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """What each of `size` ranks makes of the same request, when they build together."""

    def work(group: StoreGroup) -> dict[str, Any]:
        tokenizer = _tokenizer(request["tokenizer"], legacy=False)
        return answer(request, tokenizer, "trackbed.megatron.core", group=group)

    with _following_the_release():
        return run_ranks(size, work)


def build_with_trackbed(request: dict[str, Any]) -> list[Any]:
    """The datasets that Trackbed makes."""
    return build(request, _tokenizer(request["tokenizer"], legacy=False), "trackbed.megatron.core")


def _tokenizer(tokenizer: dict[str, Any], *, legacy: bool) -> Any:
    """One that Megatron Core takes for its own."""
    if tokenizer["kind"] == "word pieces":
        return word_piece_tokenizer(tokenizer)
    named = identity(tokenizer)
    if legacy:
        known = MegatronIdentity("NullTokenizer", [None], {"vocab_size": tokenizer["vocab_size"]})
    else:
        known = MegatronIdentity(DEFAULT_TOKENIZER, named["path"], named["options"])
    if tokenizer["kind"] == "null":
        return NullTokenizer(tokenizer["vocab_size"], megatron_identity=known)
    file = Path(tokenizer["path"]) / "tokenizer.json"
    pad = named["options"].get("pad_token")
    return HuggingFaceTokenizer(file, eod_token="</s>", pad_token=pad, megatron_identity=known)
