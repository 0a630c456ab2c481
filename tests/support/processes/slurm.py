"""A Slurm of two nodes on this machine: a controller and two daemons.

Needs root and Debian's packages: `apt-get install slurmctld slurmd slurm-client`.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol")
CONFIGURATION = """
ClusterName=trackbed
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """A controller and two nodes."""

    def __init__(self, folder):
        self.folder = folder
        ports = free_ports(4)
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(CONFIGURATION.format(folder=folder, ports=ports))
        import ray

        own = {
            "SLURM_CONF": str(self.configuration),
            "MASTER_ADDR": "127.0.0.1",  # the names of the nodes do not resolve
            "RAY_HEAD": ray.util.get_node_ip_address(),
            "RAY_PORT": str(ports[3]),
            "RAY_OPTIONS": "--min-worker-port=0 --max-worker-port=0",  # both nodes are this machine
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONWARNINGS": "ignore",
        }
        self.environment = {**os.environ, **own}
        self.run("slurmctld", "-c")
        for node in ("n1", "n2"):
            self.run("slurmd", "-N", node)
        deadline = time.monotonic() + 30
        while "idle" not in self.run("sinfo", "-h", "-o", "%T %D", check=False):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.1)

    def run(self, *command, check=True, **environment):
        found = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0 or not check, found.stderr
        return found.stdout

    def submit(self, folder, script, **environment):
        """Submits a job, and returns its number."""
        output = self.run("sbatch", "--parsable", "--chdir", str(folder), str(folder / script), **environment)
        return output.strip()

    def wait(self, job, seconds=300):
        """Waits for the end of a job, and returns its exit status."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.run("scontrol", "show", "job", job)
            if re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", found):
                return int(re.search(r"ExitCode=(\d+):", found)[1])
            time.sleep(0.2)
        pytest.fail(f"job {job} did not end: {found}")

    def kill_node(self, node):
        """Kills a node: its daemon, and all processes of jobs there."""
        os.kill(int((self.folder / f"{node}.pid").read_text()), signal.SIGKILL)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.configuration}".encode()} <= set(variables):
                os.kill(int(process.name), signal.SIGKILL)

    def close(self):
        self.run("scancel", "--state=RUNNING", "--full", check=False)
        time.sleep(1)
        processes = [int(path.read_text()) for path in self.folder.glob("*.pid")]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            time.sleep(1)


@contextlib.contextmanager
def running_slurm(folder):
    """Starts a Slurm in a new folder; skips the test where there is none."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client")
    if os.geteuid() != 0:
        pytest.skip("slurmd must run as root")
    folder.mkdir()
    slurm = Slurm(folder)
    try:
        yield slurm
    finally:
        slurm.close()
