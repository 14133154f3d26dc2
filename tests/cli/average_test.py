import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, conversion, data
from switch_tf.checkpoints import continuation, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer


@pytest.fixture(scope="module")
def folder(shallow_config, tmp_path_factory):
    """A run whose checkpoints have 1 and 2 as the values of all weights."""
    path = tmp_path_factory.mktemp("runs")
    model = SwitchTransformer(shallow_config)
    model.build()
    batches = data.Batches({None: iter(tf.data.Dataset.range(9))}, batch_size=1)
    checkpointer = Checkpointer(path / "run" / "checkpoints", tensors.state_variables(model), batches, keep=2,
                                configuration=continuation.record_of(shallow_config))
    for step in (1, 2):
        for variable in model.variables:
            variable.assign(np.full(variable.shape, step))
        checkpointer.save(step, {})
        checkpointer.wait()
    checkpointer.close()
    return path / "run"


def test_the_mean_is_written_with_its_steps(folder, tmp_path, call):
    result, shown = call(f"average --json --run={folder} --last=2 --output={tmp_path / 'mean'}")
    model = conversion.from_switch_tf(tmp_path / "mean")
    assert (result["steps"], result["num_parameters"]) == ([1, 2], model.config.num_parameters)
    assert result["vocabulary"] is None and "Without a vocabulary: " in shown
    assert all((variable.numpy() == 1.5).all() for variable in model.variables)
