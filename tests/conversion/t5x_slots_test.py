"""The state of T5X's Adafactor: a step from it is T5X's next step, in NumPy and in T5X's arrays.

The slots of each array are from a literal table, as `t5x/adafactor.py` shapes them.
"""

import dataclasses
import functools
import re

import flax.serialization
import numpy as np
import pytest

from switch_tf import SwitchConfig, conversion
from switch_tf.checkpoints import folders, tensors
from switch_tf.cli import main
from switch_tf.conversion import checkpoint_files, formats, t5x, weight_source
from switch_tf.optim.adafactor import Adafactor
from tests.conversion import from_bucket
from tests.conversion.shared import GOLDEN, built, refusal
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


def names_and_shapes(config):
    """Yields the name and the shape of each of T5X's arrays of a model."""
    for link in t5x.RULES.link(weight_source.weights_of(config)):
        yield link.theirs[0].removeprefix("target/"), link.their_shape


def arrays_of(case, is_scanned, seed):
    """T5X's arrays of a model, name -> random values."""
    random = np.random.RandomState(seed)
    arrays = {name: random.randn(*shape) for name, shape in names_and_shapes(CONFIGS[case])}
    if is_scanned:
        arrays = scanned(with_layer_biases(arrays, NUM_LAYERS), NUM_LAYERS, SUBBLOCKS[case])
    return arrays


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


WRITERS = {"msgpack": lambda folder, *arguments, **more: write(folder, *arguments, inline=10**9, **more), "zarr": write,
           "orbax": lambda *arguments, **more: write_orbax(*arguments, use_ocdbt=False, **more), "ocdbt": write_orbax}


@pytest.mark.parametrize(("case", "is_scanned", "writer"), [
    pytest.param("dense", False, "zarr", marks=pytest.mark.slow),
    pytest.param("dense", True, "msgpack", marks=pytest.mark.slow),
    pytest.param("moe", False, "ocdbt", marks=pytest.mark.slow), ("moe", True, "orbax")])
def test_the_next_step_is_t5xs(case, is_scanned, writer, tmp_path):
    config = dataclasses.replace(CONFIGS[case], relative_attention_per_layer=is_scanned)
    assert_steps(config, functools.partial(arrays_of, case, is_scanned),
                 lambda arrays, slots: WRITERS[writer](tmp_path / "in", arrays, slots=slots, step=STEP), tmp_path)


def assert_steps(config, make, write_source, folder):
    """Converts a checkpoint of STEP, goes on from the output by one step, and compares our weights after it."""
    arrays, gradients = make(seed=2), make(seed=3)
    slots, output = slots_of(arrays), folder / "out"
    result, text = formats.convert(write_source(arrays, slots), output, formats.SWITCH_TF, config=config,
                                   with_optimizer=True)
    assert result["step"] == STEP and "With the slots of Adafactor at step 1,000." in text
    gradients, expected = ([weight.numpy() for weight in conversion.from_t5x(
        write(folder / name, values), config).trainable_variables] for name, values in (
            ("gradients", gradients), ("expected", stepped(arrays, slots, gradients))))
    model = built(config)
    optimizer = Adafactor(RATE)
    optimizer.build(model.trainable_variables)
    assert tensors.restore(output, tensors.state_variables(model, optimizer))["step"] == STEP
    assert optimizer.iterations.numpy() == STEP
    before = [weight.numpy() for weight in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    for weight, old, new in zip(model.trainable_variables, before, expected, strict=True):
        change = np.abs(new - old).max()
        assert change > 1e-3, weight.path
        np.testing.assert_allclose(weight.numpy(), new, rtol=0, atol=1e-4 * change + 5e-7, err_msg=weight.path)


# Small matrices, which T5X does not factor and this package does.
SMALL = SwitchConfig(vocab_size=24, d_model=8, d_ff=12, d_kv=2, num_heads=3, num_encoder_layers=1, num_decoder_layers=1)
WI = "encoder/layers_0/mlp/wi/kernel"


@pytest.fixture(name="small", scope="module")
def small_fixture():
    """Arrays of ones, and slots of whole weights."""
    arrays = {name: np.ones(shape, "float32") for name, shape in names_and_shapes(SMALL)}
    return arrays, {name: {"v": values / 2, **dict.fromkeys(("v_row", "v_col", "m"), np.zeros(1, "float32"))}
                    for name, values in arrays.items()}


@pytest.fixture
def numbered(small, tmp_path):
    """A checkpoint of step 9 with the slot of one weight numbered from 0."""
    arrays, slots = small
    whole = np.arange(8 * 12, dtype="float32").reshape(8, 12)
    return write(tmp_path / "in", arrays, slots=slots | {WI: slots[WI] | {"v": whole}}, step=9)


def test_a_whole_slot_becomes_its_means(numbered):
    model = conversion.from_t5x(numbered, SMALL)
    found = t5x.read_optimizer(numbered, model).slots_of(model.encoder.layers[0].mlp.input_kernels[0])
    # Row 1 holds 12 to 23, column 1 holds 1, 13, ... 85.
    assert (found["v_row"].numpy()[1], found["v_col"].numpy()[1]) == (17.5, 43)


@pytest.mark.parametrize(("changes", "message"), [
    ({"m": np.zeros((8, 12))}, f"keeps momentum of 'target/{WI}', and this package's Adafactor has none; convert"),
    ({"v": np.zeros((12, 8))}, f"keeps m (1,), v (12, 8), v_col (1,), v_row (1,) of 'target/{WI}' of shape (8, 12), "
     "and T5X's Adafactor keeps a slot of that shape, or means over its two largest dimensions"),
    ({"v": np.zeros(1), "v_row": np.zeros(12), "v_col": np.zeros(8)}, "v_col (8,), v_row (12,)"),
    ({"v": np.zeros(1)}, "keeps m (1,), v (1,), v_col (1,), v_row (1,)"),
    ({"v": np.full((8, 12), -1)}, "has values that are not finite or negative"),
    ({"v": np.full((8, 12), np.nan)}, "has values that are not finite or negative"),
    ({"count": np.zeros(1)}, f"holds 'state/param_states/{WI}/count', and T5X's Adafactor holds v_row"),
    (None, f"has no slots of Adafactor for 'target/{WI}': its optimizer did not train that weight")])  # MultiOptimizer
def test_slots_that_cannot_be_taken_are_refused(changes, message, small, tmp_path):
    arrays, slots = small
    group = None if changes is None else slots[WI] | {slot: np.float32(values) for slot, values in changes.items()}
    for name, writer in WRITERS.items():
        folder = writer(tmp_path / name, arrays, slots=slots | {WI: group})
        assert message in refusal(t5x.read_optimizer, folder, conversion.from_t5x(folder, SMALL))


def test_factored_slots_of_a_weight_that_this_package_keeps_whole_are_refused(tmp_path):
    # As Mesh TensorFlow once did, from 32 heads and buckets on.
    config = dataclasses.replace(SMALL, num_heads=40, relative_attention_num_buckets=40)

    def ones(*shape):
        return checkpoint_files.Tensor(shape, lambda: np.ones(shape))

    theirs = {f"target/{name}": {"v": ones(*shape)} for name, shape in names_and_shapes(config)}
    theirs["target/encoder/relpos_bias/rel_embedding"] = {"v_row": ones(40, 1), "v_col": ones(1, 40)}
    assert "keeps v_col (1, 40), v_row (40, 1) of 'target/encoder/relpos_bias" in refusal(
        weight_source.read_adafactor, built(config), t5x.RULES, theirs, "step", 3, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_in_a_bucket_is_read_with_its_slots(numbered, bucket, monkeypatch, tmp_path):
    from_bucket.convert(numbered, bucket, monkeypatch, tmp_path / "out", SMALL, with_optimizer=True)
    assert folders.describe(tmp_path / "out")["step"] == 9


@pytest.mark.parametrize("step", [np.int32(-1), np.float32(1.5), None])
def test_a_checkpoint_without_a_number_of_steps_is_refused(step, numbered):
    file = numbered / "checkpoint"
    content = flax.serialization.msgpack_restore(file.read_bytes())
    content["optimizer"]["state"]["step"] = step
    file.write_bytes(flax.serialization.msgpack_serialize(content))
    assert "must hold its number of steps as 'state/step'" in refusal(
        t5x.read_optimizer, numbered, conversion.from_t5x(numbered, SMALL))


@pytest.mark.parametrize(("words", "message"), [
    ([f"--input={GOLDEN / 't5_1_1'}"], "optimizer's state from checkpoints of t5x, mesh_tensorflow, switch_tf, and "),
    (["--input=in", "--gin_file=gin/models/t5_tiny.gin", "--to=hugging_face"],
     "--with_optimizer is for --to=switch_tf, because hugging_face keeps no optimizer's state")])
def test_formats_without_an_optimizer_are_refused(words, message, numbered, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["convert", *words, "--output=out", "--with_optimizer"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_slots_of_step_0_are_read(small, tmp_path):
    arrays, slots = small
    folder = write(tmp_path / "in", arrays, slots=slots, step=0)
    assert t5x.read_optimizer(folder, conversion.from_t5x(folder, SMALL)).iterations.numpy() == 0
