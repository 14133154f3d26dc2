"""The losses in a router's statistics, by hand, for every semantics and for second places."""

import math

import numpy as np
import pytest

from switch_tf.layers import Router
from tests.layers.switch_layers import built


def router_of_odds(num_experts, odds, **options):
    """Statistics of one token for which the router's logits are the logarithms of odds."""
    router = built(Router(num_experts, exploration="argmax", **options), num_experts, np.eye(num_experts))
    _, stats = router(np.log(np.array([[odds]], "float32")), expert_capacity=1)
    return stats


@pytest.mark.parametrize("semantics", ["switch_tf", "mtf", "t5x", "hf"])
def test_both_losses_are_there_under_every_semantics(semantics):
    stats = router_of_odds(2, [3, 1], semantics=semantics)
    # 2 experts * (1 * 3/4 + 0 * 1/4); logsumexp(log 3, log 1) = log 4
    assert float(stats.load_balancing_loss.value) == pytest.approx(1.5, rel=1e-6)
    assert float(stats.router_z_loss.value) == pytest.approx(math.log(4) ** 2, rel=1e-6)


@pytest.mark.parametrize("num_choices", [2, 3])
def test_second_place_is_the_second_choice_however_many_there_are(num_choices):
    stats = router_of_odds(4, [4, 3, 2, 1], policy="top_n", num_selected_experts=num_choices,
                           second_place_loss_weight=0.5)
    # First choice: 4 experts * 4/10. Second, among (3, 2, 1) of 6: 4 * 3/6; half of it is added.
    assert float(stats.load_balancing_loss.value) == pytest.approx(1.6 + 0.5 * 2.0, rel=1e-6)
