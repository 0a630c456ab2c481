import pytest

from trackbed.cache.entry import canonical, differences, fingerprint


def test_the_order_of_decisions_does_not_matter():
    assert fingerprint({"a": 1, "b": [0.1]}) == fingerprint({"b": [0.1], "a": 1})


def test_a_fingerprint_never_changes():
    text = '{"a":[1,2.5,null,"x"]}'
    assert canonical({"a": [1, 2.5, None, "x"]}) == text
    assert fingerprint({"a": [1, 2.5, None, "x"]}) == "629bba16e68e57c01e0ddbacda12d8b4c2e7b949f3cabd70b58acd3b42e8b15c"


def test_a_decision_that_json_cannot_say_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        canonical({"a": float("nan")})


def test_differences_are_named_with_both_values():
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": 3}) == "b: 2, now null; c: null, now 3"
