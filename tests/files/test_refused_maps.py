"""Systems that refuse memory maps: a process goes on with fewer of them, or without."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.files.built_pair import build
from tests.support.tiers import slow_but

REFUSING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Refuses shared read-only maps of files: from a number of calls on, or while so many exist. */
static atomic_int calls, live;
static void* starts[1 << 17];

void* mmap(void* address, size_t size, int protection, int flags, int file, off_t offset) {
  static void* (*real)(void*, size_t, int, int, int, off_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "mmap");
  if (file < 0 || protection != PROT_READ || flags != MAP_SHARED) {
    return real(address, size, protection, flags, file, offset);
  }
  const char* most_calls = getenv("MOST_CALLS");
  const char* most_live = getenv("MOST_LIVE");
  if ((most_calls != NULL && atomic_fetch_add(&calls, 1) >= atoi(most_calls)) ||
      (most_live != NULL && live >= atoi(most_live))) {
    errno = EPERM;
    return MAP_FAILED;
  }
  void* found = real(address, size, protection, flags, file, offset);
  if (found != MAP_FAILED) {
    ++live;
    for (int at = 0; at < 1 << 17; ++at) {
      if (starts[at] == NULL) {
        starts[at] = found;
        break;
      }
    }
  }
  return found;
}

int munmap(void* address, size_t size) {
  static int (*real)(void*, size_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "munmap");
  for (int at = 0; at < 1 << 17 && live > 0; ++at) {
    if (starts[at] == address) {
      starts[at] = NULL;
      --live;
      break;
    }
  }
  return real(address, size);
}
"""
PROGRAM = """
import hashlib, json, logging, sys
import numpy as np
import trackbed
from trackbed.files import MAPS

logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
count, order = int(sys.argv[1]), sys.argv[2]
prefixes = {f"pairs/{number:04d}": 1.0 for number in range(count)}
train = trackbed.open_blend(
    prefixes=prefixes, sequence_length=64, order=order, split="1", size=4 * count, tokenizer="bytes",
    cache="cache-" + order,
).train
digest = hashlib.sha256()
for first in range(0, len(train), 64):
    batch = train.gather(range(first, min(first + 64, len(train))))
    digest.update(batch["tokens"].numpy().tobytes())
for at in range(0, len(train), 31):
    digest.update(train[at]["labels"].numpy().tobytes())
print(json.dumps([digest.hexdigest(), MAPS.max_open]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs whose files are larger than a page, and a library that refuses maps."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("maps")
    (folder / "refusing.c").write_text(REFUSING)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", "refusing.so", "refusing.c", "-ldl"], cwd=folder, check=True
    )
    (folder / "pairs").mkdir()
    return folder


def write_pairs(folder, count):
    for number in range(len(list((folder / "pairs").glob("*.bin"))), count):
        rng = np.random.default_rng(number)
        build(folder / "pairs" / f"{number:04d}", [rng.integers(0, 256, 20).tolist() for _ in range(250)], np.uint16)


def run(folder, count, order, **limits):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **limits}
    if limits:
        environment["LD_PRELOAD"] = str(folder / "refusing.so")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(count), order]
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout), found.stderr


@pytest.mark.parametrize(
    ("order", "count", "most"),
    slow_but([("megatron", 150, 100)], [("megatron", 150, 100), ("megatron", 3000, 1000), ("instant", 3000, 1000)]),
)
def test_samples_are_the_same_where_maps_are_refused(order, count, most, folder):
    write_pairs(folder, count)
    (expected, _), _ = run(folder, count, order)
    shutil.rmtree(folder / "cache-megatron", ignore_errors=True)
    (found, _), said = run(folder, count, order, MOST_CALLS=str(most))
    assert found == expected
    assert said.count("the system refuses memory maps: Operation not permitted; files are read without them") == 1
    shutil.rmtree(folder / "cache-megatron", ignore_errors=True)
    (found, most_open), said = run(folder, count, order, MOST_LIVE=str(most))
    assert found == expected
    assert most_open < most
    assert "files are read without them" not in said
    assert said.count("the system has refused a further memory map") >= 1
