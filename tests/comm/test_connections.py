"""The process that serves a store takes the connections of many ranks."""

import resource
import subprocess
import sys

import pytest

from tests.support.processes.launching import without_gloo

SERVE = """
import resource, subprocess, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))

import torch.distributed as dist
from trackbed.comm.torch_group import TorchGroup

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
if sys.argv[1] == "group":
    TorchGroup()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024)
clients = [subprocess.Popen([sys.executable, "-c", sys.argv[2], str(store.port)], stdout=subprocess.PIPE, text=True)
           for _ in range(2)]
print(sum(int(client.communicate(timeout=60)[0]) for client in clients))
"""
CONNECT = """
import datetime, os, sys
import torch.distributed as dist

made = []
try:
    for number in range(750):
        made.append(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False,
                                  timeout=datetime.timedelta(seconds=3)))
        made[-1].set(f"{os.getpid()}/{number}", "there")
except RuntimeError:
    pass
print(len(made))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="few files may be open here")
def test_300_ranks_with_five_connections_each_are_served_where_1024_files_may_be_open():
    command = [sys.executable, "-W", "ignore", "-c", SERVE, "group", CONNECT]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert without_gloo(process.stdout) == ["True", "1500"], process.stderr[-2000:]
