"""Collectives of a single rank."""

import pytest

from tests.support.contracts.collectives import CASES, Rank
from trackbed.comm import SOLO
from trackbed.grads.collectives import SoloCollectives


@pytest.mark.parametrize("case", CASES)
def test_one_rank_keeps_the_contract(case):
    CASES[case](Rank(SoloCollectives(), SOLO))
