from switch_tf.comparison.turns import next_turn

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
