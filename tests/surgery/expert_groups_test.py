"""Groups of experts by hand."""

import numpy as np

from switch_tf.surgery import shrinking


def test_the_most_used_experts_stay_in_their_order():
    assert shrinking.most_used(np.array([0.1, 0.4, 0.2, 0.3]), 2) == [[1], [3]]
    assert shrinking.most_used(np.array([0.25, 0.25, 0.25, 0.25]), 3) == [[0], [1], [2]]


def test_the_most_similar_experts_are_joined_whatever_their_length():
    kernel = np.array([[1, 0, 0], [0, 1, 0], [5, 0.1, 0], [0, 0, 1]], "float32")
    assert shrinking.most_similar([kernel], 3) == [[0, 2], [1], [3]]
    assert shrinking.most_similar([kernel, 0.1 * kernel], 3) == [[0, 2], [1], [3]]
    assert shrinking.most_similar([kernel], 1) == [[0, 1, 2, 3]]


def test_equal_experts_and_experts_of_zeros_are_grouped_too():
    assert shrinking.most_similar([np.ones((4, 2, 3), "float32")], 2)[0][0] == 0
    groups = shrinking.most_similar([np.zeros((3, 2), "float32")], 2)
    assert sorted(sum(groups, [])) == [0, 1, 2] and len(groups) == 2
