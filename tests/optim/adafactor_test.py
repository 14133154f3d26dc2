import keras
import numpy as np
import pytest

from switch_tf import partitioning
from switch_tf.optim import factoring
from switch_tf.optim.adafactor import Adafactor
from switch_tf.optim.schedules import RsqrtDecay


def _variable(value, axes=None):
    variable = keras.Variable(np.asarray(value, "float32"))
    if axes:
        variable.logical_axes = axes
    return variable


def _reference(weight, gradients, rate, rows=None, columns=None):
    """Adafactor in float64 for one matrix (rows and columns given) or one unfactored tensor, step by step."""
    weight = np.asarray(weight, "float64")
    row = column = whole = 0.0
    for step, gradient in enumerate(gradients):
        gradient = np.asarray(gradient, "float64")
        beta2 = 1 - (step + 1) ** -0.8
        squared = gradient**2 + 1e-30
        if rows is None:
            whole = beta2 * whole + (1 - beta2) * squared
            update = gradient / np.sqrt(whole)
        else:
            row = beta2 * row + (1 - beta2) * squared.mean(columns, keepdims=True)
            column = beta2 * column + (1 - beta2) * squared.mean(rows, keepdims=True)
            update = gradient / np.sqrt(row / row.mean(rows, keepdims=True)) / np.sqrt(column)
        update /= max(1.0, np.sqrt((update**2).mean()))
        weight = weight - rate * max(1e-3, np.sqrt((weight**2).mean())) * update
    return weight


def test_the_first_step_of_one_number_by_hand():
    # beta2 of step 0 is 0, so the update is g / |g| = 1; the step is 0.1 * RMS(weight) = 0.1 * 2
    weight = _variable([2.0])
    optimizer = Adafactor(0.1)
    optimizer.build([weight])
    optimizer.apply([np.array([5.0], "float32")], [weight])
    np.testing.assert_allclose(weight.numpy(), [2.0 - 0.1 * 2.0], rtol=1e-6)


def test_updates_are_scaled_down_to_the_clip_threshold():
    # The update 1 is twice the threshold: the step is 0.1 * 2 / 2
    weight = _variable([2.0])
    optimizer = Adafactor(0.1, clip_threshold=0.5)
    optimizer.build([weight])
    optimizer.apply([np.array([5.0], "float32")], [weight])
    np.testing.assert_allclose(weight.numpy(), [2.0 - 0.1 * 2.0 / 2], rtol=1e-6)


def test_an_expert_without_tokens_keeps_its_weights():
    start, gradient = np.ones((2, 3, 4), "float32"), np.ones((2, 3, 4), "float32")
    gradient[0] = 0
    weight = _variable(start, ("expert", "embed", "expert_mlp"))
    optimizer = Adafactor(0.1)
    optimizer.build([weight])
    for _ in range(2):
        optimizer.apply([gradient], [weight])
    np.testing.assert_array_equal(weight.numpy()[0], start[0])
    # Twice 1 - 0.1 of the weight: every update is 1.
    np.testing.assert_allclose(weight.numpy()[1], 0.9**2 * start[1], rtol=1e-6)


def test_a_matrix_follows_the_float64_formula_over_steps():
    random = np.random.RandomState(0)
    start, gradients = random.randn(3, 5), random.randn(4, 3, 5)
    weight = _variable(start, ("embed", "mlp"))
    optimizer = Adafactor(0.05)
    optimizer.build([weight])
    for gradient in gradients:
        optimizer.apply([gradient.astype("float32")], [weight])
    expected = _reference(start, gradients, 0.05, rows=(0,), columns=(1,))
    np.testing.assert_allclose(weight.numpy(), expected, rtol=2e-5)


def test_heads_and_kv_are_columns_together():
    random = np.random.RandomState(0)
    start, gradients = random.randn(4, 3, 2), random.randn(3, 4, 3, 2)
    weight = _variable(start, ("embed", "heads", "kv"))
    optimizer = Adafactor(0.05)
    optimizer.build([weight])
    for gradient in gradients:
        optimizer.apply([gradient.astype("float32")], [weight])
    expected = _reference(start, gradients, 0.05, rows=(0,), columns=(1, 2))
    np.testing.assert_allclose(weight.numpy(), expected, rtol=2e-5)


def test_each_expert_is_updated_as_if_it_were_alone():
    random = np.random.RandomState(0)
    # Very different sizes, so that a scale or clip over all experts would show.
    start = random.randn(3, 4, 5) * np.array([0.01, 1.0, 100.0]).reshape(3, 1, 1)
    gradients = random.randn(3, 3, 4, 5) * np.array([100.0, 1.0, 0.01]).reshape(3, 1, 1)
    weight = _variable(start, ("expert", "embed", "expert_mlp"))
    optimizer = Adafactor(0.05)
    optimizer.build([weight])
    for gradient in gradients:
        optimizer.apply([gradient.astype("float32")], [weight])
    for expert in range(3):
        expected = _reference(start[expert], gradients[:, expert], 0.05, rows=(0,), columns=(1,))
        np.testing.assert_allclose(weight.numpy()[expert], expected, rtol=2e-5)


def test_slots_are_factored_and_carry_the_axes_they_keep():
    layer = keras.layers.Layer(name="layer")
    wi = partitioning.add_weight(layer, "wi", (8, 16, 32), ("expert", "embed", "expert_mlp"), "ones")
    router = partitioning.add_weight(layer, "router", (16, 8), ("embed", "router_expert"), "ones")
    scale = partitioning.add_weight(layer, "scale", (16,), ("embed",), "ones")
    optimizer = Adafactor()
    optimizer.build([wi, router, scale])
    slots = [(tuple(slot.shape), slot.logical_axes) for slots in optimizer._slots for slot in slots.values()]
    assert slots == [((8, 16), ("expert", "embed")), ((8, 32), ("expert", "expert_mlp")),
                     ((16, 8), ("embed", "router_expert")), ((16,), ("embed",))]
    counted = [[weight.shape[dim] for dim in dims] for weight in (wi, router, scale)
               for dims in factoring.slot_dimensions(
                   weight.shape, factoring.factor_dimensions(weight.shape, weight.logical_axes)).values()]
    assert counted == [list(shape) for shape, _ in slots]
    # nothing but these, the step and the learning rate: no full-size second slot as in Keras' Adafactor
    assert len(optimizer.variables) == len(slots) + 2


def test_weights_without_telling_axes_are_factored_by_size():
    assert factoring.factor_dimensions((768, 64), ("embed", "router_expert")) is None
    assert factoring.factor_dimensions((768, 128), ("embed", "router_expert")) == ((), (0,), (1,))
    assert factoring.factor_dimensions((3, 200, 300), (None,) * 3) == ((0,), (1,), (2,))
    assert factoring.factor_dimensions((300,), (None,)) is None


def test_logical_axes_decide_whatever_the_sizes():
    assert factoring.factor_dimensions((2, 3), ("vocab", "embed")) == ((), (1,), (0,))
    assert factoring.factor_dimensions((2048, 16, 32), ("expert", "embed", "expert_mlp")) == ((0,), (1,), (2,))


def test_without_parameter_scale_the_step_ignores_the_weights_size():
    weight = _variable([200.0])
    optimizer = Adafactor(0.1, scales_by_parameter=False)
    optimizer.build([weight])
    optimizer.apply([np.array([5.0], "float32")], [weight])
    np.testing.assert_allclose(weight.numpy(), [199.9], rtol=1e-6)


def test_the_optimizer_survives_its_config():
    optimizer = Adafactor(0.3, clip_threshold=2.0, scales_by_parameter=False)
    copy = Adafactor.from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()


def test_keras_fit_trains_with_it():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(Adafactor(0.1), "mse")
    x = np.random.RandomState(0).randn(64, 3).astype("float32")
    history = model.fit(x, x.sum(1, keepdims=True), epochs=20, verbose=0).history["loss"]
    assert history[-1] < 0.1 * history[0]


@pytest.mark.parametrize("changes, message", [
    ({"learning_rate": "fast"}, "learning_rate must be a number 0 or above, not 'fast'"),
    ({"learning_rate": -0.1}, r"learning_rate must be a number 0 or above, not -0\.1"),
    ({"learning_rate": float("nan")}, "learning_rate must be a number 0 or above, not nan"),
    ({"decay_exponent": -1}, "decay_exponent must be a number 0 or above, not -1"),
    ({"epsilon": 0.0}, r"epsilon must be a number above 0, not 0\.0"),
    ({"clip_threshold": 0}, "clip_threshold must be a number above 0, not 0"),
    ({"minimum_scale": float("inf")}, "minimum_scale must be a number 0 or above, not inf"),
    ({"scales_by_parameter": 1}, "scales_by_parameter must be True or False, not 1"),
])
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Adafactor(**changes)


@pytest.mark.parametrize("learning_rate", [1, np.float32(1), np.int64(1), RsqrtDecay(1.0, 1), lambda: 1.0])
def test_a_learning_rate_is_any_number_or_what_gives_one(learning_rate):
    assert float(Adafactor(learning_rate).learning_rate) == 1.0
