"""verify-layout neither cries wolf nor sleeps: 20 seeds under every shipped layout, and steps that are wrong.

A step is traced once for each layout; a seed is other weights, other tokens and another step's dropout and jitter.
"""

import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, SwitchTransformer
from switch_tf.configs import shipped_gin
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.layers import slots
from switch_tf.ops import random as random_numbers
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.axes import is_partitioned
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.partitioning.variables import assign
from switch_tf.training import train_step, verification

SEEDS, STEPS = 20, 2
# Files of gin/layouts, with a mesh where theirs is not of eight devices. Those left out are among these by other names.
LAYOUTS = {"data": None, "data_model": None, "expert": None, "expert_model": None, "fully_sharded": None,
           "fully_sharded_model": None, "pod_512": "data=2,model=4"}
BY_OTHER_NAMES = {"pod_256": ("data=4,model=2", "expert_model"), "pod_512_experts": ("data=8", "expert")}
CONFIG = SwitchConfig(
    vocab_size=64, d_model=16, d_ff=32, num_heads=4, d_kv=8, num_encoder_layers=1, num_decoder_layers=0,
    encoder_sparse_step=1, num_experts=8, num_groups_multiple=8, min_expert_capacity=1, jitter_noise=0.1,
    dropout_rate=0.1, expert_dropout_rate=0.1)


def _twin(partitioner):
    return verification.Twin(lambda: SwitchTransformer(CONFIG, dtype="float64"), lambda: Adafactor(0.01), partitioner,
                             0, StepSettings())


def _batches(seed):
    """Sequences of different lengths, so that padding is spread unevenly over devices."""
    random = np.random.RandomState(seed)
    batches = []
    for _ in range(STEPS):
        inputs, targets = random.randint(1, CONFIG.vocab_size, (2, 16, 16))
        is_real = np.arange(16) < random.randint(4, 17, (16, 1))
        batches.append({name: tf.constant(value, tf.int32) for name, value in {
            "encoder_input_tokens": inputs * is_real, "encoder_target_tokens": targets * is_real,
            "encoder_loss_weights": is_real}.items()})
    return batches


def _train(twin, seed):
    """Some steps from the weights of a seed, with the dropout and jitter of steps of its own."""
    random = np.random.RandomState(1000 + seed)
    for variable in twin.model.trainable_variables:
        # As initial weights are: norms around 1, kernels around 0.
        mean, size = (1, 0.1) if variable.path.endswith("scale") else (0, 0.3)
        assign(variable, mean + size * random.standard_normal(variable.shape))
    for variable in twin.optimizer.variables:
        if variable is twin.optimizer.iterations:
            assign(variable, 100 * seed)
        elif len(variable.shape):
            assign(variable, np.zeros(variable.shape))
    return twin.train(_batches(seed))


@functools.cache
def _on_one_device(num_seeds):
    twin = _twin(Partitioner())
    return [_train(twin, seed) for seed in range(num_seeds)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_seed_gives_a_false_alarm(name, make_partitioner):
    twin = _twin(make_partitioner(name, LAYOUTS[name]))
    found = [verification.compare(one, _train(twin, seed)) for seed, one in enumerate(_on_one_device(SEEDS))]
    worst = [max(getattr(one, row).value for one in found) for row in ("loss", "gradient", "later_loss", "weight")]
    print(f"{name:20} {twin.partitioner.layout.mesh_shape:16} largest of {SEEDS} seeds: "
          + "  ".join(f"{value:.1e}" for value in worst))
    assert all(one.is_equal for one in found)
    assert len({one.losses[0] for one in found}) == SEEDS  # each seed is a step of its own


@pytest.mark.slow
def test_all_shipped_layouts_are_among_these(shipped_layout):
    shipped = {pathlib.Path(file).stem for file in shipped_gin.folder().glob("gin/layouts/*.gin")}
    # DTensor refuses to split activations over several mesh axes: partitioned_program_test.py has those that do.
    def of_two_or_more_axes(name):
        layout = shipped_layout(name)
        rules = (*layout.rules, *layout.at_rest_rules)
        named = {axis for _, axes in rules for axis in ((axes,) if isinstance(axes, str) else axes)}
        sizes = {axis: 2 if axis in ("data", "expert", "fsdp") else 1 for axis in sorted(named)}
        return shipped_layout(name, ",".join(f"{axis}={size}" for axis, size in sizes.items())).axes_over_several

    for_tpus = {name for name in shipped if of_two_or_more_axes(name)}
    assert shipped - for_tpus == {*LAYOUTS, *BY_OTHER_NAMES, "single", "auto"}
    for name, (mesh_shape, same) in BY_OTHER_NAMES.items():
        assert shipped_layout(name, mesh_shape) == shipped_layout(same)


# Each is what its name says, in the partitioned program alone.

def _gradient_times_1_0001(patch):
    original = train_step.apply_gradients
    patch.setattr(train_step, "apply_gradients", lambda model, optimizer, gradients, *rest: original(
        model, optimizer, [gradient * 1.0001 for gradient in gradients] if is_partitioned() else gradients, *rest))


def _one_gradient_times_1_0001(patch):
    original = train_step.apply_gradients
    patch.setattr(train_step, "apply_gradients", lambda model, optimizer, gradients, *rest: original(
        model, optimizer, [gradients[0] * 1.0001, *gradients[1:]] if is_partitioned() else gradients, *rest))


def _divisor_times_1_00001(patch):
    original = Objective.weights

    def weights(self, *args):
        counts = original(self, *args)
        return counts._replace(targets=counts.targets * 1.00001) if is_partitioned() else counts

    patch.setattr(Objective, "weights", weights)


def _shifted_slots_of_experts(patch):
    original = slots.positions

    def positions(in_line, num_experts):
        place, length = original(in_line, num_experts)
        return (place + 1 if is_partitioned() else place), length

    patch.setattr(slots, "positions", positions)


def _shifted_slots_of_the_optimizer(patch):
    original = Adafactor._average

    def average(self, slot, value, beta2):
        found = original(self, slot, value, beta2)
        return tf.concat([found[1:], found[:1]], axis=0) if is_partitioned() and len(slot.shape) == 1 else found

    patch.setattr(Adafactor, "_average", average)


def _layout_dependent_dropout(patch):
    original = random_numbers.batch_positions
    patch.setattr(random_numbers, "batch_positions",
                  lambda size: original(size) % (size // 2) if is_partitioned() else original(size))


@pytest.mark.slow
@pytest.mark.parametrize("plant", [
    _gradient_times_1_0001, _one_gradient_times_1_0001, _divisor_times_1_00001, _shifted_slots_of_experts,
    _shifted_slots_of_the_optimizer, _layout_dependent_dropout])
def test_a_wrong_step_is_caught(plant, make_partitioner, monkeypatch):
    plant(monkeypatch)
    found = verification.compare(_on_one_device(1)[0], _train(_twin(make_partitioner("expert", "data=2")), 0))
    print(f"{plant.__name__[1:]:32} " + "  ".join(
        f"{getattr(found, row).value:.1e}" for row in ("loss", "gradient", "later_loss", "weight")))
    assert not found.is_equal
