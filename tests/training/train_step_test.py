import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.configs.run import StepSettings
from switch_tf.evaluation.objectives import Objective
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import train_step

SEED = 3
# Half of the operations of a traced step are draws; without them where a test is not about them.
NO_DROPOUT = {"dropout_rate": 0.0, "expert_dropout_rate": 0.0}


def _build(config, learning_rate=0.01, dtype=None):
    keras.utils.set_random_seed(1)
    model = SwitchTransformer(config, dtype=dtype)
    model.build()
    optimizer = Adafactor(learning_rate)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def _gradients(config, batch, settings, known={}):  # noqa: B006  all tests have the same batch
    if (config, settings) not in known:
        model, optimizer = _build(config)
        step = optimizer.iterations.value
        compute = tf.function(lambda: train_step.compute_gradients(model, batch, SEED, step, settings), autograph=False)
        gradients, measured = compute()
        known[config, settings] = ([gradient.numpy() for gradient in gradients],
                                   keras.tree.map_structure(np.float64, measured))
    return known[config, settings]


@pytest.fixture(scope="module")
def encoder_config(shallow_config):
    """An encoder alone, without draws, for tests of what any model does."""
    return dataclasses.replace(shallow_config, num_decoder_layers=0, **NO_DROPOUT)


@pytest.fixture(scope="module")
def encoder_batch(batch):
    """Features of an encoder that predicts its own inputs."""
    inputs = batch["encoder_input_tokens"]
    return {"encoder_input_tokens": inputs, "encoder_target_tokens": inputs,
            "encoder_loss_weights": tf.cast(inputs > 0, tf.int32)}


@pytest.fixture(scope="module")
def compiled(shallow_config):
    """A model, its optimizer and their compiled step, shared because tracing it takes seconds."""
    model, optimizer = _build(shallow_config)
    optimizer.learning_rate = 0.0  # so that steps differ by what they draw alone
    return model, optimizer, train_step.compile_steps(model, optimizer, SEED, StepSettings())


def _assert_same(first, second, tolerance):
    """Each tensor's largest difference is small against the tensor's largest entry."""
    for one, other in zip(first, second, strict=True):
        assert np.max(np.abs(one - other)) <= tolerance * max(np.max(np.abs(one)), 1e-6)


def test_every_step_draws_dropout_and_jitter_of_its_own_and_the_same_ones_again(compiled, batch):
    _, optimizer, step = compiled

    def losses():
        optimizer.iterations.assign(0)
        return [float(step({name: value[None] for name, value in batch.items()})[0].loss.total) for _ in range(3)]

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first


@pytest.mark.slow  # models/switch_transformer_test.py adds up the parts of a batch
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_microbatches_give_the_gradient_of_the_whole_batch_with_dropout_and_jitter(shallow_config, batch,
                                                                                    num_microbatches):
    whole, whole_metrics = _gradients(shallow_config, batch, StepSettings())
    parts, part_metrics = _gradients(shallow_config, batch, StepSettings(num_microbatches=num_microbatches))
    _assert_same(whole, parts, 1e-5)
    tf.nest.map_structure(lambda mine, theirs: np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6),
                          part_metrics, whole_metrics)


@pytest.mark.slow
def test_rematerialisation_and_dispatch_do_not_change_the_gradient(shallow_config, batch):
    plain, _ = _gradients(shallow_config, batch, StepSettings())
    for changes, settings in (({"remat": True}, StepSettings(num_microbatches=2)),
                              ({"dispatch": "einsum"}, StepSettings())):
        _assert_same(plain, _gradients(dataclasses.replace(shallow_config, **changes), batch, settings)[0], 1e-5)


@pytest.mark.slow
def test_xla_computes_the_same_gradient(shallow_config, batch):
    model, optimizer = _build(shallow_config)
    plain, _ = _gradients(shallow_config, batch, StepSettings())
    compiled, _ = tf.function(
        lambda: train_step.compute_gradients(model, batch, SEED, optimizer.iterations.value, StepSettings()),
        jit_compile=True, autograph=False)()
    _assert_same(plain, [gradient.numpy() for gradient in compiled], 1e-4)


def _after_two_steps(config, batch, use_xla):
    two = {name: tf.stack([value] * 2) for name, value in batch.items()}
    model, _ = _build(config)
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.build(model.trainable_variables)
    settings = StepSettings(use_xla=use_xla, steps_per_call=2, clip_norm=1.0)
    step = train_step.compile_steps(model, optimizer, SEED, settings)
    functions = step.function.get_concrete_function(two).graph.as_graph_def().library.function
    compiled = [node for function in functions for node in function.node_def if node.attr["_XlaMustCompile"].b]
    assert bool(compiled) == use_xla
    _, bad_step = step(two)
    assert int(bad_step) == -1 and int(optimizer.iterations) == 2
    return [variable.numpy() for variable in (*model.trainable_variables, *optimizer.variables)]


@pytest.fixture(scope="module")
def plain_config(shallow_config):
    return dataclasses.replace(shallow_config, **NO_DROPOUT)


@pytest.fixture(scope="module")
def two_steps(plain_config, batch):
    return _after_two_steps(plain_config, batch, use_xla=False)


@pytest.mark.slow
def test_with_xla_a_step_updates_alike(plain_config, batch, two_steps):
    _assert_same(two_steps, _after_two_steps(plain_config, batch, use_xla=True), 1e-5)


@pytest.mark.slow
def test_tensorflows_graph_optimiser_changes_no_step(plain_config, batch, two_steps):
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    try:
        optimised = _after_two_steps(plain_config, batch, use_xla=False)
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # as conftest.py has it
    _assert_same(two_steps, optimised, 1e-5)


def test_embedding_gradients_are_dense(shallow_config, batch):
    model, optimizer = _build(shallow_config)
    gradients, _ = train_step.compute_gradients(model, batch, SEED, optimizer.iterations.value, StepSettings())
    assert all(isinstance(gradient, tf.Tensor) for gradient in gradients)


@pytest.mark.slow
def test_foreign_semantics_accumulate_alike(shallow_config, batch):
    config = dataclasses.replace(shallow_config, semantics="hf", expert_capacity=3, **NO_DROPOUT)
    whole, _ = _gradients(config, batch, StepSettings())
    parts, _ = _gradients(config, batch, StepSettings(num_microbatches=2))
    _assert_same(whole, parts, 1e-5)


def test_an_encoder_alone_learns_from_its_own_targets(shallow_config, encoder_batch):
    model, optimizer = _build(dataclasses.replace(shallow_config, num_decoder_layers=0), 0.1)
    step = train_step.compile_steps(model, optimizer, SEED, StepSettings())
    stacked = {name: value[None] for name, value in encoder_batch.items()}
    losses = [float(step(stacked)[0].batch.loss_terms["cross_entropy"].value) for _ in range(10)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("share_of_norm", [0.3, 1.5])
def test_clipping_scales_a_larger_gradient_to_the_norm_and_no_smaller_one(encoder_config, encoder_batch, share_of_norm):
    model, _ = _build(encoder_config)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.trainable_variables]
    gradients = [tf.constant(gradient) for gradient in _gradients(encoder_config, encoder_batch, StepSettings())[0]]
    norm = float(tf.linalg.global_norm(gradients))
    train_step.apply_gradients(model, optimizer, gradients, norm, (),
                               StepSettings(clip_norm=share_of_norm * norm))
    moved = [variable.numpy() - old for variable, old in zip(model.trainable_variables, before, strict=True)]
    length = np.sqrt(sum(np.sum(np.square(move.astype("float64"))) for move in moved))
    assert length == pytest.approx(min(share_of_norm, 1) * norm, rel=1e-4)


@pytest.mark.slow
def test_several_steps_in_a_call_are_the_same_steps(plain_config, batch):
    model, optimizer = _build(plain_config)
    one = train_step.compile_steps(model, optimizer, SEED, StepSettings())
    singles = [one({name: value[None] for name, value in batch.items()})[0] for _ in range(3)]
    model, optimizer = _build(plain_config)
    three = train_step.compile_steps(model, optimizer, SEED, StepSettings(steps_per_call=3))
    merged, bad_step = three({name: tf.stack([value] * 3) for name, value in batch.items()})
    assert int(bad_step) == -1
    assert int(optimizer.iterations) == 3
    expected = sum(float(single.batch.loss_terms["cross_entropy"].total) for single in singles)
    assert float(merged.batch.loss_terms["cross_entropy"].total) == pytest.approx(expected, rel=1e-5)


def _check_nothing_changes(model, optimizer, step, batch, steps_per_call=1):
    """Runs a call whose first step is not finite, checks that no variable changes, and returns the metrics."""
    before = [variable.numpy() for variable in (*model.variables, *optimizer.variables)]
    measured, bad_step = step({name: tf.stack([value] * steps_per_call) for name, value in batch.items()})
    assert int(bad_step) == 0
    for old, variable in zip(before, (*model.variables, *optimizer.variables), strict=True):
        np.testing.assert_array_equal(old, variable.numpy())
    return measured


def test_a_step_that_is_not_finite_changes_nothing(compiled, batch):
    model, optimizer, _ = compiled
    kernel = model.encoder.layers[0].mlp.router.kernel
    finite = kernel.numpy()
    optimizer.learning_rate = 0.01
    kernel.assign(np.full((16, 4), np.nan))
    _check_nothing_changes(*compiled, batch)
    kernel.assign(finite)
    optimizer.learning_rate = 0.0


@pytest.mark.slow
def test_steps_of_a_call_that_are_not_finite_change_nothing(shallow_config, batch):
    model, optimizer = _build(shallow_config)
    model.encoder.layers[0].mlp.router.kernel.assign(np.full((16, 4), np.nan))
    step = train_step.compile_steps(model, optimizer, SEED, StepSettings(steps_per_call=3))
    _check_nothing_changes(model, optimizer, step, batch, 3)


def test_neither_does_one_whose_gradient_alone_is_not_finite(encoder_config, encoder_batch):
    model, optimizer = _build(encoder_config)
    weight = model.trainable_variables[0].value

    class Steep(Objective):
        def total(self, *args):
            nothing = tf.reduce_sum(weight - weight)
            # The root is 0, and so is the inner derivative; the outer one is infinite.
            return super().total(*args) + tf.sqrt(nothing)

    step = train_step.compile_steps(model, optimizer, SEED, StepSettings(), objective=Steep())
    assert np.isfinite(_check_nothing_changes(model, optimizer, step, encoder_batch).loss.total)


def test_a_bfloat16_model_keeps_float32_weights_losses_and_router_statistics(shallow_config, batch):
    model, optimizer = _build(shallow_config, dtype="mixed_bfloat16")
    gradients, measured = train_step.compute_gradients(model, batch, SEED, optimizer.iterations.value, StepSettings())
    assert {variable.dtype for variable in model.variables} == {"float32"}
    assert {gradient.dtype for gradient in gradients} == {tf.float32}
    assert {tensor.dtype for tensor in tf.nest.flatten(measured)} == {tf.float32}


def test_microbatches_that_cannot_hold_whole_groups_are_refused(shallow_config, batch):
    config = dataclasses.replace(shallow_config, num_groups_multiple=1, group_size=4096)
    model, optimizer = _build(config)
    with pytest.raises(ValueError, match="A batch routed in 1 groups cannot be cut into 2 parts of whole groups"):
        train_step.compute_gradients(model, batch, SEED, optimizer.iterations.value, StepSettings(num_microbatches=2))


@pytest.mark.parametrize("backend", ["plain", pytest.param("pjrt", marks=pytest.mark.slow)])
def test_after_a_step_that_is_not_finite_no_step_makes_an_update(backend, make_partitioner, shallow_config, batch,
                                                                 monkeypatch):
    if backend == "plain":
        monkeypatch.setattr(Partitioner, "is_asynchronous", True)
    partitioner = Partitioner() if backend == "plain" else make_partitioner("expert", "data=2", backend=backend)
    model, optimizer = SwitchTransformer(shallow_config), Adafactor(0.01)
    partitioner.build(model, optimizer)
    step = train_step.compile_steps(model, optimizer, 3, StepSettings(), partitioner)
    placed = partitioner.place({name: value[None] for name, value in batch.items()})
    kernel = model.encoder.layers[0].mlp.router.kernel
    calls = [step.start(placed)]
    before = kernel.numpy()
    kernel.assign(np.full(kernel.shape, np.inf, np.float32))
    calls.append(step.start(placed))
    kernel.assign(before)
    calls.append(step.start(placed))
    assert [call().bad_step for call in calls] == [-1, 0, 0] and int(optimizer.iterations.numpy()) == 1
    np.testing.assert_array_equal(kernel.numpy(), before)
