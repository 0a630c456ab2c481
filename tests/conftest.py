"""Fixtures and settings that all tests share.

`TRACKBED_TIER=full` asks Hypothesis for many examples; the default, `ci`, for few, and always the same ones.
"""

import inspect
import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from packaging.specifiers import SpecifierSet

import trackbed.files.late_files
from tests.support.collected import COLLECTED
from tests.support.files.indexed_pair import Pair
from tests.support.stores.ceph import ceph_bucket, ceph_endpoint  # noqa: F401 - fixtures for all folders
from tests.support.stores.servers import (  # noqa: F401 - fixtures for all folders
    any_bucket,
    bucket,
    deaf_store,
    moto_endpoint,
    place,
    proxy,
    web_server,
)

# Tests of pairs that lack a file do not wait for it to appear.
trackbed.files.late_files._SECONDS = 0.1

# torch looks up the name of every address for its messages, and waits for name servers that do not answer. The C
# library reads this once, at its first look-up: names of `/etc/hosts` are found, others are not asked for.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# Without a GPU, Triton's interpreter runs its kernels. It is chosen when Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A fixture that lives as long as the test is fine where every example writes files of its own.
_QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile(
    "ci", max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=_QUIET
)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_QUIET)
TIER = os.environ.get("TRACKBED_TIER", "ci")
settings.load_profile(TIER)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script that starts the tests in the background has them, and each process that they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


WARNINGS_OF_OTHERS = (
    ("torch", ">=2.14", "ignore:Validating sparse tensor invariants:UserWarning"),
    ("torch", "<2.13", "ignore:TypedStorage is deprecated:UserWarning"),
    ("triton", "<3.8", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    ("megatron-core", ">=0.18", "ignore:Could not determine rank from torch.distributed:UserWarning"),
    (
        "megatron-core",
        ">=0.18",
        "ignore:Exception ignored in. <function IndexedDataset.__del__:pytest.PytestUnraisableExceptionWarning",
    ),
)
"""Packages, their releases that give the warning about themselves, and the filter."""


def pytest_configure(config):
    """Filters the warnings that installed releases of other packages give about themselves."""
    for package, releases, line in WARNINGS_OF_OTHERS:
        with suppress(PackageNotFoundError):
            if version(package) in SpecifierSet(releases):
                config.addinivalue_line("filterwarnings", line)
    if sys.version_info[:3] == (3, 13, 0):  # torch says so when it compiles
        config.addinivalue_line("filterwarnings", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")


def pytest_report_header():
    """Says which tests are not collected."""
    if find_spec("megatron") is None:
        return "tests/conformance: not collected, as megatron-core is not installed"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks tests that start processes, and property tests in the full tier, where their examples are many, as slow."""
    config.stash[COLLECTED] = {item.nodeid for item in items}
    for item in items:
        function = getattr(item, "function", None)
        if TIER == "full" and is_hypothesis_test(function):
            item.add_marker("slow")
        fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        functions = [function, *(fixture.func for several in fixtures.values() for fixture in several)]
        if any(_starts_processes(inspect.unwrap(each), set()) for each in functions if each is not None):
            item.add_marker("dist")


def _starts_processes(function, seen):
    """True if a function, or one of its module that it names, uses a helper of `tests.support.processes`."""
    if function in seen or not isinstance(function, FunctionType):
        return False
    seen.add(function)
    codes = [function.__code__]
    for code in codes:  # with those of nested functions
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    used = [function.__globals__.get(name) for code in codes for name in code.co_names]
    return any(
        (getattr(each, "__module__", None) or getattr(each, "__name__", "")).startswith("tests.support.processes")
        or (getattr(each, "__module__", None) == function.__module__ and _starts_processes(each, seen))
        for each in used
        if each is not None
    )


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def level(request, monkeypatch):
    """Name of an instruction level, at which kernels run for the length of the test."""
    from trackbed.kernels import available_levels

    if request.param not in available_levels():
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv("TRACKBED_ISA", request.param)
    return request.param


@pytest.fixture
def pair(tmp_path):
    """Three sequences of int32 in two documents, written without the builder."""
    return Pair(tmp_path / "corpus", lengths=[3, 0, 2], borders=[0, 2, 3], tokens=[5, 6, 7, -1, 9]).write()


def pytest_terminal_summary(terminalreporter):
    """How many generated configurations were identical, and how many somebody refused."""
    for report in terminalreporter.stats.get("passed", []):
        for name, counts in report.user_properties:
            if name.startswith("conformance"):
                terminalreporter.write_line(
                    f"{name}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
                )
