"""The state of T5X's Adafactor: a step from it is T5X's next step, in NumPy and in T5X's arrays.

The slots of each array are from a literal table, as `t5x/adafactor.py` shapes them.
"""

import dataclasses
import re

import numpy as np
import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.checkpoints import folders, tensors
from switch_tf.cli import main
from switch_tf.conversion import converting, formats, linked_weights, t5x
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.optim.adafactor import Adafactor
from tests.conversion.t5x_checkpoints import scanned, with_layer_biases, write
from tests.conversion.t5x_orbax_test import write_orbax

STEP, RATE = 1000, 0.01
# heads * d_kv = d_model, so nothing but the order of the dimensions says which slot is which.
SIZES = {"vocab_size": 256, "d_model": 128, "d_ff": 192, "d_kv": 32, "num_heads": 4, "num_encoder_layers": 4,
         "num_decoder_layers": 2}
CONFIGS = {"dense": SwitchConfig(**SIZES, activation="geglu", logits_via_embedding=False),
           "moe": SwitchConfig(**SIZES, num_experts=3, semantics="t5x")}
NUM_LAYERS = {"encoder": 4, "decoder": 2}
SUBBLOCKS = {"dense": None, "moe": {"encoder": 2, "decoder": 2}}

# End of a name, shape -> dimensions that v_row and v_col lack, and dimensions that the step averages over.
MATRICES = {
    ("(query|key|value|out)/kernel", (128, 128)): ((1,), (0,)),  # of equal sizes the first one is the rows
    (r"mlp/wi(_\d)?/kernel", (128, 192)): ((1,), (0,)), ("mlp/wo/kernel", (192, 128)): ((0,), (1,)),
    ("embedding", (256, 128)): ((0,), (1,)), ("logits_dense/kernel", (128, 256)): ((1,), (0,)),
    ("expert/wi/kernel", (3, 128, 192)): ((2,), (1,)), ("expert/wo/kernel", (3, 192, 128)): ((1,), (2,))}
SCANNED = {
    ("(query|key|value)/kernel", (128, None, 128)): ((2,), (0,)), ("out/kernel", (128, None, 128)): ((0,), (2,)),
    (r"mlp/wi(_\d)?/kernel", (128, None, 192)): ((2,), (0,)), ("mlp/wo/kernel", (192, None, 128)): ((0,), (2,)),
    ("expert/wi/kernel", (3, None, 128, 192)): ((3,), (2,)), ("expert/wo/kernel", (3, None, 192, 128)): ((2,), (3,))}


def arrays_of(case, is_scanned, seed):
    """T5X's arrays of a model, name -> random values."""
    config, random = CONFIGS[case], np.random.RandomState(seed)
    model = SwitchTransformer(config)
    model.build()
    arrays = {link.theirs[0].removeprefix("target/"): random.randn(*link.their_shape) for link in t5x.RULES.link(
        {name: tuple(it.shape) for name, it in linked_weights.variables_of(model).items()})}
    if is_scanned:
        arrays = scanned(with_layer_biases(arrays, NUM_LAYERS), NUM_LAYERS, SUBBLOCKS[case])
    return arrays


def config_of(case, is_scanned):
    return dataclasses.replace(CONFIGS[case], relative_attention_per_layer=is_scanned)


def roles(name, shape):
    """The dimensions that v_row and v_col lack, or None, and those of a batch of matrices."""
    is_scanned = re.match(r"(encoder|decoder)/\1/", name)
    for (end, wanted), dims in (SCANNED if is_scanned else MATRICES).items():
        fits = len(shape) == len(wanted) and all(size in (None, one) for size, one in zip(wanted, shape, strict=True))
        if fits and re.search(rf"(^|/){end}$", name):
            return dims, ({0} if "expert" in name else set()) | ({1} if is_scanned else set())
    return None, {1} if is_scanned else set()


def slots_of(arrays, seed=1):
    """The slots of an Adafactor that has seen several gradients."""
    random, unused = np.random.RandomState(seed), np.zeros(1)
    slots = {}
    for name, values in arrays.items():
        dims, _ = roles(name, values.shape)
        squares = sum(random.randn(*values.shape) ** 2 for _ in range(2)) * random.rand(*values.shape[:1]).reshape(
            -1, *[1] * (values.ndim - 1))
        means = {} if dims is None else dict(zip(("v_row", "v_col"), (squares.mean(one) for one in dims), strict=True))
        group = dict.fromkeys(("v_row", "v_col", "v", "m"), unused) | (means or {"v": squares})
        slots[name] = {slot: values.astype("float32") for slot, values in group.items()}
    return slots


def stepped(arrays, slots, gradients):
    """T5X's arrays after a step of its Adafactor in float64."""
    beta2 = 1 - (STEP + 1) ** -0.8
    result = {}
    for name, values in arrays.items():
        gradient, (dims, batch) = gradients[name], roles(name, values.shape)
        squares, within = gradient**2 + 1e-30, tuple(set(range(values.ndim)) - batch)
        if dims is None:
            update = gradient / np.sqrt(beta2 * slots[name]["v"] + (1 - beta2) * squares)
        else:
            row, column = (np.expand_dims(beta2 * slots[name][slot] + (1 - beta2) * squares.mean(one), one)
                           for slot, one in zip(("v_row", "v_col"), dims, strict=True))
            update = gradient / np.sqrt(row / row.mean(dims[1], keepdims=True)) / np.sqrt(column)
        update = update / np.maximum(1, np.sqrt((update**2).mean(within, keepdims=True)))
        scale = np.maximum(1e-3, np.sqrt((values**2).mean(within, keepdims=True)))
        result[name] = values - RATE * scale * update
    return result


def weights_of(folder, arrays, config):
    return [weight.numpy() for weight in conversion.from_t5x(write(folder, arrays), config).trainable_variables]


WRITERS = {"msgpack": lambda folder, *arguments, **more: write(folder, *arguments, inline=10**9, **more), "zarr": write,
           "orbax": lambda *arguments, **more: write_orbax(*arguments, use_ocdbt=False, **more), "ocdbt": write_orbax}


@pytest.mark.parametrize(("case", "is_scanned", "writer"), [
    ("dense", False, "zarr"), ("dense", True, "msgpack"), ("moe", False, "ocdbt"), ("moe", True, "orbax")])
def test_the_next_step_is_t5xs(case, is_scanned, writer, tmp_path):
    arrays, gradients = (arrays_of(case, is_scanned, seed) for seed in (2, 3))
    config, slots = config_of(case, is_scanned), slots_of(arrays)
    source = WRITERS[writer](tmp_path / "in", arrays, slots=slots, step=STEP)
    result, text = converting.convert(source, tmp_path / "out", formats.SWITCH_TF, config=config, with_optimizer=True)
    assert result["step"] == STEP and "With the slots of Adafactor at step 1,000." in text

    model = SwitchTransformer(config)
    model.build()
    optimizer = Adafactor(RATE)
    optimizer.build(model.trainable_variables)
    assert tensors.restore(tmp_path / "out", tensors.state_variables(model, optimizer))["step"] == STEP
    assert optimizer.iterations.numpy() == STEP
    before = [weight.numpy() for weight in model.trainable_variables]
    optimizer.apply(weights_of(tmp_path / "gradients", gradients, config), model.trainable_variables)
    expected = weights_of(tmp_path / "expected", stepped(arrays, slots, gradients), config)
    for weight, old, new in zip(model.trainable_variables, before, expected, strict=True):
        change = np.abs(new - old).max()
        assert change > 1e-3, weight.path
        np.testing.assert_allclose(weight.numpy(), new, rtol=0, atol=1e-4 * change + 5e-7, err_msg=weight.path)
