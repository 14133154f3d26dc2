"""Calls that are waited for, or given up."""

import threading

import pytest

from switch_tf.data import batches


def test_what_a_call_returns_or_raises_is_passed_on():
    assert batches.Call(lambda: 5).result(lambda: False) == 5
    with pytest.raises(ZeroDivisionError):
        batches.Call(lambda: 1 / 0).result(lambda: False)


def test_a_call_that_never_returns_is_given_up_when_that_is_wanted():
    go, asked = threading.Event(), []
    with pytest.raises(batches.GivenUp):
        batches.Call(go.wait).result(lambda: asked.append(0) or len(asked) == 3)
    assert len(asked) == 3
    go.set()
