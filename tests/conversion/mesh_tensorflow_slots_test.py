"""The state of Mesh TensorFlow's Adafactor: a step from it is the next step, in NumPy."""

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.conversion import mesh_tensorflow
from tests.conversion.mesh_tensorflow_checkpoints import variables_from, write
from tests.conversion.t5x_slots_test import (
    CONFIGS,
    STEP,
    arrays_of,
    assert_steps,
    slots_of,
    stepped,
    weights_of,
)


def named(arrays, case):
    return variables_from(arrays, layers_per_block=1 if case == "dense" else 2)


def their_slots(slots, shape):
    """Mesh TensorFlow's slots of a variable, given T5X's: of equal dimensions it averages over the first one first."""
    if slots["v"].shape == shape:
        return {"v": slots["v"]}
    row, column = ("v_col", "v_row") if shape == (128, 128) else ("v_row", "v_col")
    return {"vr": slots[row], "vc": slots[column]}


def checkpoint(folder, arrays, slots, case, **options):
    variables = named(arrays, case)
    by_variable = dict(zip(variables, slots.values(), strict=True))
    return write(folder, variables | {f"{name}_slot_{slot}": values for name, group in by_variable.items()
                                      for slot, values in their_slots(group, variables[name].shape).items()}, **options)


@pytest.mark.parametrize("case", [pytest.param("dense", marks=pytest.mark.slow), "moe"])
def test_the_next_step_is_mesh_tensorflows(case, tmp_path):
    arrays, gradients = (arrays_of(case, False, seed) for seed in (2, 3))
    slots = slots_of(arrays)
    source = checkpoint(tmp_path / "in", arrays, slots, case, step=STEP)
    assert_steps(source, CONFIGS[case], weights_of(tmp_path / "gradients", gradients, CONFIGS[case]),
                 weights_of(tmp_path / "expected", stepped(arrays, slots, gradients), CONFIGS[case]), tmp_path / "out")


@pytest.fixture(name="dense", scope="module")
def dense_fixture():
    arrays = arrays_of("dense", False, 2)
    return named(arrays, "dense"), slots_of(arrays)


@pytest.mark.parametrize(("slots", "message"), [
    ({}, "has no slots of Adafactor for 'shared/embedding'"),
    ({"v": (256, 128), "m": (256, 128)}, "keeps momentum of 'shared/embedding'"),
    ({"vr": (256,), "vc": (128,)}, "keeps vc (128,), vr (256,) of 'shared/embedding' of shape (256, 128), and Mesh"),
    ({"vr": (128,)}, "keeps vr (128,) of 'shared/embedding'"),
    ({"v": (128, 256)}, "keeps v (128, 256) of 'shared/embedding' of shape (256, 128), and Mesh")])
def test_slots_that_cannot_be_taken_are_refused(slots, message, dense, tmp_path):
    variables, _ = dense
    others = {f"{name}_slot_v": np.ones(values.shape) for name, values in variables.items() if "shared" not in name}
    folder = write(tmp_path / "in", variables | others | {
        f"shared/embedding_slot_{slot}": np.ones(shape) for slot, shape in slots.items()})
    model = conversion.from_mesh_tensorflow(folder, CONFIGS["dense"])
    with pytest.raises(ValueError) as error:
        mesh_tensorflow.read_optimizer(folder, model)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_checkpoint_without_a_number_of_steps_is_refused(dense, tmp_path):
    variables, _ = dense
    slots = {f"{name}_slot_v": np.ones(values.shape) for name, values in variables.items()}
    folder = write(tmp_path / "in", variables | slots, step=-1)
    model = conversion.from_mesh_tensorflow(folder, CONFIGS["dense"])
    with pytest.raises(ValueError, match="must hold its number of steps as 'global_step'"):
        mesh_tensorflow.read_optimizer(folder, model)
