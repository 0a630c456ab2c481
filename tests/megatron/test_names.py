"""Names of `dist_checkpointing` that are imported from `trackbed.megatron`."""

import subprocess
import sys

import pytest

import trackbed.megatron
from trackbed.megatron.checkpoints import serialization


@pytest.mark.parametrize("name", trackbed.megatron.__all__)
def test_each_name_is_there(name):
    assert getattr(getattr(trackbed.megatron, name), "__name__", name) == name
    assert name in dir(trackbed.megatron)


def test_save_and_load_are_those_of_megatron_cores_paths():
    assert (trackbed.megatron.save, trackbed.megatron.load) == (serialization.save, serialization.load)


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match=r"module 'trackbed\.megatron' has no attribute 'saves'"):
        _ = trackbed.megatron.saves


def test_checkpoints_are_not_imported_for_data_alone():
    program = "import sys, trackbed.megatron.core.datasets.gpt_dataset; print('trackbed.checkpoint' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "False\n"
