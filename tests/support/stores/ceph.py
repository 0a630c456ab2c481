"""Ceph's radosgw on 127.0.0.1: a monitor, one storage daemon in memory, and the S3 server, each one process.

Needs root and Debian's packages: `apt-get install radosgw ceph-mon ceph-osd ceph-common ceph-base`.
`python tests/support/stores/ceph.py COMMAND...` runs a command beside one, which its environment names.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from tests.support.processes.launching import free_port
from tests.support.stores.servers import ACCESS_KEY, SECRET_KEY, S3Bucket, use_endpoint

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool", "ceph")


def why_not():
    """Returns the reason why radosgw cannot be started here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install radosgw ceph-mon ceph-osd ceph-common ceph-base"
    return None if os.geteuid() == 0 else "radosgw's storage daemon is started by root only"


class Ceph:
    """A cluster in a folder; `endpoint` is the address of its S3 server."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.conf = self.folder / "ceph.conf"
        self.daemons = []
        self.port, self.monitor_port = free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def start(self):
        """Starts the daemons, and waits until the S3 server answers and has a user."""
        self._write_configuration()
        self._make_keys()
        monitor = ["--monmap", f"{self.folder}/monmap", "--keyring", f"{self.folder}/mon.keyring"]
        self._run("ceph-mon", "--mkfs", "-i", "a", *monitor)
        self._daemon("ceph-mon", "-f", "-i", "a")
        self._wait(lambda: self._ceph("status"), 30)
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd)
        key = self._ceph("auth", "get-or-create-key", "osd.0", "mon", "allow *", "osd", "allow *")
        (self.folder / "osd").mkdir()
        (self.folder / "osd" / "keyring").write_text(f"[osd.0]\nkey = {key}\n")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-f", "-i", "0")
        grants = ("mon", "allow rwx", "osd", "allow rwx")
        self._run("ceph", "auth", "get-or-create", "client.rgw", *grants, "-o", f"{self.folder}/rgw.keyring")
        self._daemon("radosgw", "-f", "-n", "client.rgw")
        keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        return self

    def stop(self):
        """Kills the daemons, whose data is in memory."""
        for process in reversed(self.daemons):
            process.kill()
            process.wait()

    def _write_configuration(self):
        settings = {
            "global": {
                "fsid": uuid.uuid4(),
                "mon host": f"v1:127.0.0.1:{self.monitor_port}",
                "public addr": "127.0.0.1",
                "cluster addr": "127.0.0.1",
                "public network": "127.0.0.0/8",
                "cluster network": "127.0.0.0/8",
                "keyring": f"{self.folder}/admin.keyring",
                "run dir": self.folder,
                "admin socket": f"{self.folder}/$name.asok",
                "log file": f"{self.folder}/$name.log",
                "osd pool default size": 1,
                "osd pool default min size": 1,
                "osd pool default pg num": 8,
                "osd crush chooseleaf type": 0,
                "mon allow pool size one": "true",
                "auth allow insecure global id reclaim": "false",
                "osd pool default pg autoscale mode": "off",
            },
            "mon": {"mon data": f"{self.folder}/mon", "mon cluster log file": f"{self.folder}/cluster.log"},
            "osd": {
                "osd data": f"{self.folder}/osd",
                "osd objectstore": "memstore",
                "memstore device bytes": 10 << 30,
                "keyring": f"{self.folder}/osd/keyring",
                "osd class load list": "*",
            },
            "client.rgw": {
                "rgw frontends": f"beast endpoint=127.0.0.1:{self.port} tcp_nodelay=1",
                "rgw data": f"{self.folder}/rgw",
                "rgw gc obj min wait": 2,  # seconds until the memory of objects that were removed is free
                "rgw gc processor period": 2,
                "rgw gc processor max time": 2,
                "keyring": f"{self.folder}/rgw.keyring",
            },
        }
        lines = []
        for section, values in settings.items():
            lines += [f"[{section}]", *(f"{name} = {value}" for name, value in values.items()), ""]
        self.conf.write_text("\n".join(lines))
        self.fsid = settings["global"]["fsid"]

    def _make_keys(self):
        admin, monitor = f"{self.folder}/admin.keyring", f"{self.folder}/mon.keyring"
        grants = [word for name in ("mon", "osd", "mgr") for word in ("--cap", name, "allow *")]
        self._run("ceph-authtool", "--create-keyring", monitor, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self._run("ceph-authtool", "--create-keyring", admin, "--gen-key", "-n", "client.admin", *grants)
        self._run("ceph-authtool", monitor, "--import-keyring", admin)
        place = f"[v1:127.0.0.1:{self.monitor_port}]"
        self._run("monmaptool", "--create", "--addv", "a", place, "--fsid", str(self.fsid), f"{self.folder}/monmap")

    def _run(self, program, *arguments):
        conf = () if program in ("ceph-authtool", "monmaptool") else ("-c", str(self.conf))
        command = [program, *conf, *arguments]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if found.returncode:
            raise RuntimeError(f"{' '.join(command)}: {found.stdout[-500:]}{found.stderr[-1500:]}")
        return found.stdout.strip()

    def _ceph(self, *arguments):
        return self._run("ceph", "--connect-timeout", "5", *arguments)

    def _daemon(self, program, *arguments):
        with (self.folder / f"{program}.out").open("wb") as out:
            command = [program, "-c", str(self.conf), *arguments]
            self.daemons.append(subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL))

    @staticmethod
    def _wait(ready, seconds):
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):
                ready()
                return
            if time.monotonic() > deadline:
                ready()
            time.sleep(0.2)


@pytest.fixture(scope="session")
def ceph_endpoint(tmp_path_factory):
    """Address of radosgw's S3 server, one per process of the test session."""
    pytest.importorskip("obstore")
    reason = why_not()
    if reason:
        pytest.skip(reason)
    server = Ceph(tmp_path_factory.mktemp("ceph"))
    try:
        server.start()
        S3Bucket.wait(server.endpoint)
        yield server.endpoint
    finally:
        server.stop()


@pytest.fixture
def ceph_bucket(ceph_endpoint, monkeypatch):
    """A new bucket of radosgw, which the environment names."""
    use_endpoint(monkeypatch, ceph_endpoint)
    return S3Bucket(ceph_endpoint)


def main():
    """Runs a command beside a server, and exits with its status."""
    if why_not():
        sys.exit(why_not())
    with tempfile.TemporaryDirectory() as folder:
        server = Ceph(folder)
        try:
            server.start()
            S3Bucket.wait(server.endpoint)
            names = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
            endpoint = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
            status = subprocess.run(sys.argv[1:], env={**os.environ, **names, **endpoint}, check=False).returncode
        finally:
            server.stop()
    sys.exit(status)


if __name__ == "__main__":
    main()
