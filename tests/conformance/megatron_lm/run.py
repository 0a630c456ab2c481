"""Runs Megatron-LM's own tests, core_v0.16.1 or core_v0.19.0, on Trackbed through `trackbed.megatron.install()`.

    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM
    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM --ranks 2
    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM --suite distributed
    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM --suite distributed --stock
    python tests/conformance/megatron_lm/run.py /path/to/Megatron-LM --suite checkpoint

Ranks communicate by gloo, and no GPU is used; each rank runs every test, and all must pass. `--stock` runs the tests on
unmodified Megatron Core, as a baseline. Further options go to pytest. The checkout is read, never copied;
`requirements.txt` beside this file lists the imports of its training package, which the suite `data` needs.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TAGS = "core_v0.16.1 or core_v0.19.0"


@dataclass(frozen=True, slots=True)
class Run:
    """Test files that run together, on a number of ranks."""

    tests: tuple[str, ...]
    num_ranks: int
    plugins: tuple[str, ...]
    expression: str = ""
    """Tests that run, as pytest's option -k; empty for all."""
    since: tuple[int, int] = (0, 16)
    """The release that has them first."""
    before: tuple[int, int] = (1, 0)
    """The release that has them no more, or for which Trackbed has no counterpart."""


def distributed(num_ranks: int, *names: str) -> Run:
    """A run of files of `tests/unit_tests/distributed`."""
    tests = tuple(f"tests/unit_tests/distributed/{name}.py" for name in names)
    return Run(tests, num_ranks, ("cuda_shim", "gloo_shim"), before=(0, 18))


def checkpoint(name: str, expression: str = "") -> Run:
    """A run of a file of `tests/unit_tests/dist_checkpointing`, or of some of its tests."""
    plugins = ("checkpoint_shim", "cuda_shim", "gloo_shim")
    return Run((f"tests/unit_tests/dist_checkpointing/{name}.py",), 8, plugins, expression)


SUITES = {
    "checkpoint": (
        checkpoint("test_mapping"),
        # Its ranks race, with torch 2.13 on Megatron Core too.
        checkpoint("test_serialization", "not log_difference and not remove_sharded_tensors"),
        # Memory is that of a GPU; TestCrossRanksReads replaces a method of torch's planner, which is not used.
        checkpoint("test_fully_parallel", "not memory and not TestCrossRanksReads"),
        checkpoint("test_torch_dist"),
        checkpoint("test_checkpointable"),
        checkpoint("test_optimizer", "test_optimizer_params"),
        checkpoint("test_strict"),
        # The other ones replace a method of Megatron's writer, which is not used, or need nvidia-resiliency-ext.
        checkpoint("test_async_save", "not errors_are_reported and not nvrx"),
    ),
    "data": (
        Run(
            tuple(f"tests/unit_tests/data/test_{name}.py" for name in ("builder", "gpt_dataset", "multimodal_dataset")),
            1,
            ("gloo_shim",),
        ),
        Run(("tests/unit_tests/data/test_prepare_cache.py",), 1, ("gloo_shim",), since=(0, 18)),
        Run(("tests/unit_tests/models/test_t5_model.py",), 1, ("gloo_shim",), "TestT5ModelAttentionDimensions"),
    ),
    "distributed": (
        distributed(2, "test_param_and_grad_buffer", "test_distributed_data_parallel"),
        distributed(4, "test_reduce_scatter_with_fp32_accumulation"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs Megatron-LM's own tests on Trackbed.")
    parser.add_argument("checkout", nargs="?", default="", help=f"a checkout of Megatron-LM ({TAGS})")
    parser.add_argument("--suite", choices=SUITES, default="data")
    parser.add_argument("--ranks", type=int, help="number of ranks, in place of the suite's own")
    parser.add_argument("--stock", action="store_true", help="run on unmodified Megatron Core")
    options, pytest_options = parser.parse_known_args()
    of_checkout = release(Path(options.checkout))
    runs = [run for run in SUITES[options.suite] if run.since <= of_checkout < run.before]
    if not runs:
        print(f"skipped: install() leaves the suite {options.suite} of this release to Megatron Core")
        return 0
    tests = [test for run in runs for test in run.tests]
    if not options.checkout or not all((Path(options.checkout) / test).is_file() for test in tests):
        found = options.checkout or "no path"
        print(f"skipped: a checkout of Megatron-LM ({TAGS}) with {' and '.join(tests)} is needed, found {found}")
        return 2 if options.checkout else 0
    checkout = Path(options.checkout).resolve()
    common = () if options.stock else ("install_trackbed",)
    return max(
        run_tests(
            checkout,
            run.tests,
            options.ranks or run.num_ranks,
            (*common, *run.plugins),
            [*(["-k", run.expression] if run.expression else []), *pytest_options],
        )
        for run in runs
    )


def release(checkout: Path) -> tuple[int, int]:
    """Major and minor number of a checkout; the oldest for a folder that is none."""
    described = checkout / "megatron" / "core" / "package_info.py"
    text = described.read_text() if described.is_file() else "MAJOR = 0\nMINOR = 16"
    major, minor = (int(re.search(rf"^{name} = (\d+)", text, flags=re.MULTILINE)[1]) for name in ("MAJOR", "MINOR"))
    return major, minor


def run_tests(
    checkout: Path, tests: tuple[str, ...], num_ranks: int, plugins: tuple[str, ...], pytest_options: list[str]
) -> int:
    """Runs test files on several ranks, and returns the highest exit status."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "pytest", "-c", os.devnull, "--rootdir", str(checkout)),
        *("--noconftest", "-p", "no:cacheprovider", "-q", "-ra"),
        *(option for plugin in plugins for option in ("-p", plugin)),
        *pytest_options,
        *tests,
    ]
    path = os.pathsep.join(filter(None, [str(checkout), str(HERE), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as shared:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
        common = {"OMP_NUM_THREADS": "1", **os.environ, **meeting, "PYTHONPATH": path, "TRACKBED_TEST_FOLDER": shared}
        ranks = [
            subprocess.Popen(command, cwd=checkout, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_ranks)
        ]
        return max(rank.wait() for rank in ranks)


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
