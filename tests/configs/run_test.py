"""A run that cannot be, and a model, a batch and a layout that do not go together, are refused in a sentence."""

import dataclasses
import re

import pytest

from switch_tf.configs.run import Run, StepSettings, check_periods
from switch_tf.partitioning import Layout
from switch_tf.training.train_step import check_division

DATA = (("batch", "data"), ("group", "data"))
LENGTHS = {"inputs": 12, "targets": 6}
RUN = Run(model_dir="run", mixture_or_task_name="task", task_feature_lengths=LENGTHS, train_steps=6, batch_size=4,
          log_period=2, eval_period=0, checkpoint_period=2)
FOUR = Layout("data=4", (*DATA, ("expert", "data")))


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_dir": ""}, "MODEL_DIR must be text that is not empty, not ''."),
    ({"model_dir": 5}, "MODEL_DIR must be text that is not empty, not 5."),
    ({"mixture_or_task_name": None}, "MIXTURE_OR_TASK_NAME must be text that is not empty, not None."),
    ({"initial_checkpoint": " "}, "INITIAL_CHECKPOINT must be text that is not empty, not ' '."),
    ({"task_feature_lengths": {"inputs": 12, "targets": 0}}, "TASK_FEATURE_LENGTHS['targets'] must be an integer of at "
                                                             "least 1, not 0."),
    ({"restart_changed_data": "yes"}, "restart_changed_data must be True or False, not 'yes'.")])
def test_a_run_without_a_place_or_data_is_refused(changes, message):
    with pytest.raises(ValueError) as raised:
        dataclasses.replace(RUN, **changes)
    assert str(raised.value) == message


def refusal(config, layout=FOUR, batch_size=8, lengths=LENGTHS, num_microbatches=1):
    with pytest.raises(ValueError) as raised:
        check_division(config, layout, batch_size, lengths, num_microbatches)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_divides_fits(tiny_config):
    # 8 * 12 = 96 tokens in 4 groups of 24, 8 * 6 = 48 in 4 of 12: one for each device, or two for each microbatch.
    check_division(tiny_config, FOUR, 8, LENGTHS, 1)
    check_division(tiny_config, Layout("data=2", DATA), 8, LENGTHS, 2)
    check_division(tiny_config, Layout(), 8, LENGTHS, 4)


@pytest.mark.parametrize("lengths", [128, {}, {"inputs": 12}, {"targets": 6},
                                     {"inputs": 12, "targets": 6, "more": 1}])
def test_lengths_are_tokens_of_inputs_and_targets(lengths):
    with pytest.raises(ValueError) as raised:
        dataclasses.replace(RUN, task_feature_lengths=lengths)
    assert str(raised.value) == (
        'TASK_FEATURE_LENGTHS must give the tokens of "inputs" and "targets", such as '
        f"{{'inputs': 128, 'targets': 29}}, not {lengths!r}.")


def test_microbatches_divide_the_batch(tiny_config):
    assert refusal(tiny_config, Layout(), 8, num_microbatches=3) == (
        "BATCH_SIZE must be a multiple of 3 (3 microbatches times 1 device), not 8.")


def test_the_data_axis_divides_the_batch_of_each_microbatch(tiny_config):
    assert refusal(tiny_config, batch_size=6) == (
        "BATCH_SIZE must be a multiple of 4 (1 microbatch times 4 devices), not 6.")
    # 8 / 4 = 2 sequences of a microbatch cannot be cut over 4 devices, although 8 can.
    assert "BATCH_SIZE must be a multiple of 16" in refusal(tiny_config, batch_size=8, num_microbatches=4)


@pytest.mark.parametrize(("rule", "changes", "message"), [
    (("heads", "model"), {}, "The layout cuts num_heads ('heads', 2) over the 4 devices of mesh axis 'model', which "
                             "must divide it; make it a multiple of 4, or set MESH_SHAPE to model=2."),
    (("expert", "model"), {"num_experts": 6}, "The layout cuts num_experts ('expert', 6) over the 4 devices"),
    (("vocab", "model"), {"vocab_size": 383}, "The layout cuts vocab_size ('vocab', 383) over the 4 devices"),
    (("expert_mlp", "model"), {"d_ff": 30}, "The layout cuts d_ff ('expert_mlp', 30) over the 4 devices")])
def test_the_model_axis_divides_the_model(tiny_config, rule, changes, message):
    config = dataclasses.replace(tiny_config, **changes)
    assert refusal(config, Layout("model=4", (rule,))).startswith(message)
    check_division(config, Layout("model=1", (rule,)), 8, LENGTHS, 1)


def test_weights_at_rest_are_divided_too(tiny_config):
    layout = Layout("data=3", at_rest_rules=(("embed", "data"),))
    assert refusal(tiny_config, layout).startswith("The layout cuts d_model ('embed', 16) over the 3 devices")


def test_a_dense_model_has_no_experts_to_divide(tiny_config):
    dense = dataclasses.replace(tiny_config, num_experts=0)
    check_division(dense, Layout("data=3", (("batch", "data"), ("expert", "data"))), 9, LENGTHS, 1)
    check_division(dense, FOUR, 8, {"inputs": 7, "targets": 5}, 2)


def test_each_device_has_whole_groups_of_each_microbatch(tiny_config):
    # 2 microbatches on 4 devices are 8 parts, of 4 groups.
    assert refusal(tiny_config, num_microbatches=2) == (
        "A batch routed in 4 groups cannot be cut into 8 parts of whole groups (microbatches times devices of the data "
        "axis). Set num_groups_multiple to a multiple of 8, or use fewer of them.")
    check_division(dataclasses.replace(tiny_config, num_groups_multiple=8), FOUR, 8, LENGTHS, 2)


def test_groups_that_are_not_split_need_not_divide(tiny_config):
    config = dataclasses.replace(tiny_config, num_groups_multiple=1)
    assert refusal(config).startswith("A batch routed in 1 groups cannot be cut into 4 parts")
    check_division(config, Layout("data=4", (("batch", "data"),)), 8, LENGTHS, 1)


def test_groups_of_targets_are_looked_at_where_the_decoder_is_sparse(tiny_config):
    config = dataclasses.replace(tiny_config, num_groups_multiple=16)
    lengths = {"inputs": 12, "targets": 5}  # 96 tokens are 6 * 16, 40 are not
    assert re.match(r"No number of groups that is a multiple of 16 divides 40 tokens \(8 sequences of 5\) .* "
                    r"Use a batch of 16 sequences, or num_groups_multiple=8\.", refusal(config, lengths=lengths))
    check_division(dataclasses.replace(config, decoder_sparse_step=0), FOUR, 8, lengths, 1)
    check_division(config, FOUR, 16, lengths, 1)


def test_with_semantics_hf_each_sequence_is_a_group(tiny_config):
    config = dataclasses.replace(tiny_config, semantics="hf", expert_capacity=2, num_groups_multiple=1)
    check_division(config, FOUR, 8, {"inputs": 7, "targets": 5}, 2)
    assert "BATCH_SIZE must be a multiple of 4" in refusal(config, batch_size=6)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_microbatches": 0}, "num_microbatches must be an integer of at least 1, not 0"),
    ({"steps_per_call": 1.5}, "steps_per_call must be an integer of at least 1, not 1.5"),
    ({"clip_norm": 0}, "clip_norm must be a number above 0, not 0"),
    ({"label_smoothing": 1.0}, r"label_smoothing must be a number in \[0, 1\), not 1.0"),
    ({"z_loss_weight": float("nan")}, "z_loss_weight must be a number 0 or above, not nan"),
    ({"use_xla": "no"}, "use_xla must be True or False, not 'no'"),
    ({"z_loss_weight": -1.0}, "z_loss_weight must be a number 0 or above, not -1.0"),
])
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        StepSettings(**changes)


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"log_period": 0}, {"train_steps": 1.5}, {"seed": -1}])
def test_impossible_numbers_are_refused(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"{name.upper()} must be an integer of at least"):
        dataclasses.replace(RUN, **changes)


def test_what_is_done_every_so_many_steps_falls_between_two_calls():
    check_periods(RUN, StepSettings(steps_per_call=2))
    with pytest.raises(ValueError, match=r"LOG_PERIOD must be a multiple of steps_per_call \(3\), .* it is 2"):
        check_periods(RUN, StepSettings(steps_per_call=3))
