"""The warning about masks that an order does not read."""

import logging

import numpy as np
import pytest

from tests.support.files.blends import build, gpt_config
from tests.support.files.built_pair import build as write_documents
from trackbed.datasets.mask_check import tell_of_masks

LOGGER = "trackbed.datasets.mask_check"


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger=LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]


def pairs_in(folder, masked):
    for name in ("a", "b", "c"):
        write_documents(folder / name, [[1, 2, 3, 4]] * 9, np.uint16)
    for name in masked:
        (folder / f"{name}.mask").write_bytes(b"not read")
    return [str(folder / name) for name in ("a", "b", "c")]


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_mask_is_told_once(tmp_path, warnings, order):
    pairs = pairs_in(tmp_path, "b")
    for _ in range(2):
        build(gpt_config(tmp_path / "cache", blend=(pairs, None), split="1", order=order), (4, 0, 0))
    (message,) = warnings()
    assert message.startswith(f"a mask lies beside {tmp_path}/b: order {order!r} does not read masks")


def test_several_masks_of_a_group_are_one_warning(tmp_path, warnings):
    pairs = pairs_in(tmp_path, "ac")
    config = gpt_config(tmp_path / "cache", blend=(["g"], None), groups={"g": pairs}, split="1", order="instant")
    build(config, (4, 0, 0))
    (message,) = warnings()
    assert message.startswith(f"masks of 2 pairs lie beside {tmp_path}/a and others: ")


def test_without_masks_nothing_is_told(tmp_path, warnings):
    pairs = pairs_in(tmp_path, "")
    build(gpt_config(tmp_path / "cache", blend=(pairs, None), split="1"), (4, 0, 0))
    assert warnings() == []


@pytest.mark.parametrize("pair", ["a\0/x", "missing/x", "\udcff/x"])
def test_a_folder_that_cannot_be_listed_is_left_to_the_opening(warnings, pair):
    tell_of_masks([pair], "instant")
    assert warnings() == []
