"""Each semantics is a record of rules; what follows from them is tested where they are read."""

import dataclasses

import pytest

from switch_tf import SwitchConfig
from switch_tf.configs.semantics import rules_of


@pytest.mark.parametrize("name, counted_by", [
    # Whether padding is in the divisor of the load-balancing loss, of the z-loss.
    ("switch_tf", (False, False)), ("mtf", (True, False)), ("t5x", (True, True)), ("hf", (True, True))])
def test_which_losses_count_padding(name, counted_by):
    rules = rules_of(name)
    assert (rules.balance_counts_padding, rules.routes_padding) == counted_by


@pytest.mark.parametrize("name, is_zeroed", [("switch_tf", False), ("mtf", True), ("t5x", True), ("hf", False)])
def test_who_zeroes_padding_before_experts(name, is_zeroed):
    assert rules_of(name).zeroes_padding == is_zeroed


@pytest.mark.parametrize("name, step, layers", [
    ("switch_tf", 1, (0, 1, 2, 3, 4, 5, 6)), ("switch_tf", 2, (1, 3, 5)), ("t5x", 3, (2, 5)), ("mtf", 8, ()),
    ("hf", 1, (0, 1, 2, 3, 4, 5, 6)), ("hf", 2, (1, 3, 5)), ("hf", 3, (1, 4)), ("hf", 8, (1,))])
def test_which_of_seven_layers_are_sparse(name, step, layers):
    assert rules_of(name).sparse_layers(7, step) == layers


def test_by_default_the_rules_are_this_packages():
    assert SwitchConfig().rules == rules_of("switch_tf")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules_of("switch_tf").routes_padding = True


def test_unknown_semantics_name_the_nearest():
    with pytest.raises(ValueError, match=r"semantics must be one of 'switch_tf', .*, not 'mft'\. Did you mean 'mtf'\?"):
        rules_of("mft")
