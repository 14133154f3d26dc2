"""A saved model is loaded by Keras in a process that has imported nothing of ours but the package."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import switch_tf
from switch_tf.installation import keras_registration
from switch_tf.optim import adafactor, schedules

LOAD = """
import sys
{imports}
assert "switch_tf.layers" not in sys.modules
model = keras.models.load_model(sys.argv[1])
assert type(model.layers[-1]).__module__ == "switch_tf.layers.moe"
assert type(model.optimizer.learning_rate) is not float
model.save(sys.argv[2])
"""


def test_every_class_that_is_registered_is_named_with_its_module():
    found = {}
    folder = pathlib.Path(switch_tf.__file__).parent
    for file in folder.rglob("*.py"):
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        for name in re.findall(r'@(?:serializable|.*serializable\("switch_tf"\))\nclass (\w+)', file.read_text()):
            found[name] = module
    assert found == keras_registration.CLASSES


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A functional model of a user's own with a Switch layer, trained for a step, and what it makes of ones."""
    inputs = keras.Input((4, 8))
    outputs = switch_tf.layers.SwitchFeedForward(num_experts=2, d_ff=16, router="top2")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(adafactor.Adafactor(schedules.RsqrtDecay(0.1, 10)), "mse")
    model.fit(np.ones((2, 4, 8), "float32"), np.zeros((2, 4, 8), "float32"), verbose=0)
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model.save(path)
    return path, model.predict(np.ones((2, 4, 8), "float32"), verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["import keras, switch_tf", "import switch_tf, keras"])
def test_a_new_process_loads_it_whatever_is_imported_first(saved, imports, tmp_path):
    path, expected = saved
    done = subprocess.run([sys.executable, "-c", LOAD.format(imports=imports), path, tmp_path / "again.keras"],
                          env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = keras.models.load_model(tmp_path / "again.keras")
    np.testing.assert_array_equal(again.predict(np.ones((2, 4, 8), "float32"), verbose=0), expected)
    assert again.optimizer.iterations == 1
