"""What a launcher sets for the processes that it starts."""

import os
import socket

QUIET = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environments(size, launcher="torch"):
    """What a launcher sets for each rank."""
    port = free_port()
    for rank in range(size):
        if launcher == "srun":
            names = {
                "SLURM_PROCID": rank,
                "SLURM_NTASKS": size,
                "SLURM_NODELIST": "localhost",
                "SLURM_JOB_ID": port - 10_000,
            }
            if not 10_000 <= port < 30_000:
                names["MASTER_PORT"] = port
        else:
            names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        yield {**os.environ, **QUIET, **{name: str(value) for name, value in names.items()}}
