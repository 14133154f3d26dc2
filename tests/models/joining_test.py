"""Shares of the losses that a stack has as a whole, by hand; tests/parity/hugging_face_losses_test.py has theirs."""

import pytest
import tensorflow as tf

from switch_tf.losses import Balance
from switch_tf.metrics import Mean, RouterStats
from switch_tf.models.stack import join


def stats(balance, z_loss):
    nothing = Mean(tf.constant(0.0), tf.constant(5.0))
    return RouterStats(*[nothing] * 5, load_balancing_loss=balance, router_z_loss=Mean(tf.constant(5 * z_loss), 5.0))


def balance(fraction, mean_prob):
    return Balance(tf.constant([fraction]), tf.constant([mean_prob]), tf.constant([5.0]))


def values(joined):
    return [(float(each.load_balancing_loss.value), float(each.router_z_loss.value)) for each in joined]


def test_layers_even_one_another_out():
    # All 5 tokens go to the first of two experts in one layer, to the second in the other: 2 each by themselves. Over
    # both, f times 2 is (1, 1), so that each layer's share is (1 * 1 + 1 * 0) / 2. Shares of z are halves.
    layers = (stats(balance([2.0, 0.0], [1.0, 0.0]), 4.0), stats(balance([0.0, 2.0], [0.0, 1.0]), 2.0))
    assert values(join(layers, is_omitted=False)) == [(0.5, 2.0), (0.5, 1.0)]


def test_one_layers_losses_are_its_own():
    assert values(join((stats(balance([1.5, 0.5], [0.75, 0.25]), 4.0),), is_omitted=False)) == [(1.25, 4.0)]


def test_omitted_losses_are_0_and_keep_their_weights():
    (joined,) = join((stats(balance([2.0, 0.0], [1.0, 0.0]), 4.0),), is_omitted=True)
    assert values([joined]) == [(0.0, 0.0)]
    assert joined.load_balancing_loss.weight == joined.router_z_loss.weight == 5


def test_a_policy_that_balances_by_itself_has_a_z_loss_alone():
    nothing = Mean(tf.constant(0.0), tf.constant(5.0))
    assert values(join((stats(nothing, 4.0), stats(nothing, 2.0)), is_omitted=False)) == [(0.0, 2.0), (0.0, 1.0)]


@pytest.mark.parametrize("is_omitted", [False, True])
def test_a_stack_without_routers_has_nothing_to_share(is_omitted):
    assert join((), is_omitted) == ()
