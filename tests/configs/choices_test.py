from switch_tf.configs import choices


def test_nearest_says_nothing_where_nothing_is_near():
    assert choices.nearest("xyzzy", ["switch_base_8"]) == ""
