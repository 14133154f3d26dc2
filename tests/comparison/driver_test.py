from types import SimpleNamespace

import pytest

from switch_tf.comparison import driver
from switch_tf.comparison.driver import Progress, next_turn
from switch_tf.refusals import Refusal
from switch_tf.training.stopping import Stopping

NAMES = ("dense", "few", "many")


def order(steps, train_steps, turn):
    """Who trains to which step, until all are done."""
    taken = []
    while due := next_turn(steps, train_steps, turn):
        name, end = due
        assert steps[name] < end
        steps = {**steps, name: end}
        taken.append(due)
    return taken


def test_the_order_rotates_and_the_last_turn_is_shorter():
    taken = order(dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 7), turn=3)
    assert taken == [("dense", 3), ("few", 3), ("many", 3), ("few", 6), ("many", 6), ("dense", 6), ("many", 7),
                     ("dense", 7), ("few", 7)]


def test_laggards_come_first():
    taken = order({"dense": 8, "few": 3, "many": 6}, dict.fromkeys(NAMES, 9), turn=3)
    assert taken[0] == ("few", 6)
    assert sorted(taken[1:]) == [("dense", 9), ("few", 9), ("many", 9)]


def test_who_has_fewer_steps_to_train_is_done_before():
    assert order({"dense": 0, "few": 0}, {"dense": 2, "few": 6}, turn=4) == [("dense", 2), ("few", 4), ("few", 6)]


def test_nothing_is_left_to_do():
    assert next_turn(dict.fromkeys(NAMES, 9), dict.fromkeys(NAMES, 9), 4) is None


class Stub:
    """A trainer, and the training that it starts: it counts steps, and fails at one of them."""

    def __init__(self, train_steps, fails_at=None, stops_at=None, error=None):
        self.run = SimpleNamespace(train_steps=train_steps)
        self.state = SimpleNamespace(step=0)
        self.fails_at, self.stops_at, self.error = fails_at, stops_at, error
        self.calls = []

    def start(self, text, progress):
        self.calls.append(("start", text))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.calls.append("closed")

    def advance(self, step, stop_reason, num_untimed_steps, look_at):
        if self.fails_at is not None and step > self.fails_at:
            raise self.error or Refusal("not finite\nand more")
        self.state.step = step if self.stops_at is None else min(step, self.stops_at)
        self.calls.append((step, num_untimed_steps))

    def save(self):
        self.calls.append("saved")

    def finish(self):
        self.calls.append("finished")


def train(tmp_path, **stubs):
    return driver.take_turns(stubs, dict.fromkeys(stubs, "text"), Progress(100), tmp_path / "batches.jsonl", 4,
                             Stopping(print))


def test_all_train_to_their_last_step_and_finish(tmp_path):
    one, two = Stub(6), Stub(6)
    assert train(tmp_path, one=one, two=two)
    assert one.calls == two.calls == [("start", "text"), (4, 2), (6, 2), "finished", "closed"]


def test_where_one_fails_the_others_are_saved_and_all_are_closed(tmp_path):
    one, two = Stub(8), Stub(8, fails_at=4)
    with pytest.raises(Refusal, match="^two: not finite$"):
        train(tmp_path, one=one, two=two)
    assert one.calls[-3:] == ["saved", "finished", "closed"]
    assert "finished" not in two.calls and two.calls[-1] == "closed"


def test_a_bug_in_one_keeps_its_traceback_and_names_the_variant(tmp_path):
    one, two = Stub(8), Stub(8, fails_at=4, error=ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="^a bug") as raised:
        train(tmp_path, one=one, two=two)
    assert raised.value.__notes__ == ["It ended the variant two."]
    assert one.calls[-2:] == ["finished", "closed"]


def test_where_one_stops_all_stop_and_are_saved(tmp_path):
    one, two = Stub(8), Stub(8, stops_at=3)
    assert not train(tmp_path, one=one, two=two)
    assert (one.state.step, two.state.step) == (4, 3)
    assert all(stub.calls[-3:] == ["saved", "finished", "closed"] for stub in (one, two))
