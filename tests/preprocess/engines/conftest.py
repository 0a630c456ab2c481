"""A Ray of this process, which the tests of a module share."""

import os
import sys
import warnings

import pytest


@pytest.fixture(scope="module")
def local_ray():
    """Ray with two cores; engines that find it do not end it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # workers import the functions of tests
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield ray
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
