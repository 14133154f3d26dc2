"""The state of Mesh TensorFlow's Adafactor: a step from it is the next step, in NumPy."""

import functools

import numpy as np
import pytest

from switch_tf import conversion
from switch_tf.conversion import mesh_tensorflow
from tests.conversion.mesh_tensorflow_checkpoints import variables_from, write
from tests.conversion.shared import refusal
from tests.conversion.t5x_slots_test import CONFIGS, STEP, arrays_of, assert_steps


def named(arrays, case):
    return variables_from(arrays, layers_per_block=1 if case == "dense" else 2)


def their_slots(slots, shape):
    """Mesh TensorFlow's slots of a variable, given T5X's: of equal dimensions it averages over the first one first."""
    if slots["v"].shape == shape:
        return {"v": slots["v"]}
    row, column = ("v_col", "v_row") if shape == (128, 128) else ("v_row", "v_col")
    return {"vr": slots[row], "vc": slots[column]}


def checkpoint(folder, case, arrays, slots):
    variables = named(arrays, case)
    by_variable = dict(zip(variables, slots.values(), strict=True))
    return write(folder, variables | {f"{name}_slot_{slot}": values for name, group in by_variable.items() for
                                      slot, values in their_slots(group, variables[name].shape).items()}, step=STEP)


@pytest.mark.parametrize("case", [pytest.param("dense", marks=pytest.mark.slow), "moe"])
def test_the_next_step_is_mesh_tensorflows(case, tmp_path):
    assert_steps(CONFIGS[case], functools.partial(arrays_of, case, False),
                 functools.partial(checkpoint, tmp_path / "in", case), tmp_path)


@pytest.fixture(scope="module")
def variables():
    return named(arrays_of("dense", False, 2), "dense")


@pytest.mark.parametrize(("slots", "step", "message"), [
    ({}, 7, "has no slots of Adafactor for 'shared/embedding'"),
    ({"v": (256, 128), "m": (256, 128)}, 7, "keeps momentum of 'shared/embedding'"),
    ({"vr": (256,), "vc": (128,)}, 7, "keeps vc (128,), vr (256,) of 'shared/embedding' of shape (256, 128), and Mesh"),
    ({"vr": (128,)}, 7, "keeps vr (128,) of 'shared/embedding'"),
    ({"v": (128, 256)}, 7, "keeps v (128, 256) of 'shared/embedding' of shape (256, 128), and Mesh"),
    ({"v": (256, 128)}, -1, "must hold its number of steps as 'global_step'")])
def test_slots_and_steps_that_cannot_be_taken_are_refused(slots, step, message, variables, tmp_path):
    others = {f"{name}_slot_v": np.ones(values.shape) for name, values in variables.items() if "shared" not in name}
    folder = write(tmp_path / "in", variables | others | {
        f"shared/embedding_slot_{slot}": np.ones(shape) for slot, shape in slots.items()}, step=step)
    assert message in refusal(mesh_tensorflow.read_optimizer, folder,
                              conversion.from_mesh_tensorflow(folder, CONFIGS["dense"]))
