"""The mean of checkpoints, tensor by tensor."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchTransformer, conversion, data
from switch_tf.checkpoints import continuation, folders, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.checkpoints.tensors import StoredWeights
from switch_tf.conversion import weight_source
from switch_tf.storage import places, whole_file
from switch_tf.surgery import sources, upcycling


@pytest.fixture(scope="module")
def model(shallow_config):
    made = SwitchTransformer(shallow_config)
    made.build()
    return made


@pytest.fixture
def save(model, tmp_path):
    """A function that saves checkpoints with a value for all weights; returns the run folder."""

    def save(values, config=model.config, folder=tmp_path / "run"):
        batches = data.Batches({None: iter(tf.data.Dataset.range(9))}, batch_size=1)
        checkpointer = Checkpointer(places.at(folder) / "checkpoints", tensors.state_variables(model), batches, keep=9,
                                    configuration=continuation.record_of(config))
        for step, value in values.items():
            for variable in model.variables:
                variable.assign(np.full(variable.shape, value))
            checkpointer.save(step, {})
            checkpointer.wait()
        checkpointer.close()
        return places.at(folder)

    return save


def _values(mean):
    return {float(value) for name in mean.weights for value in np.unique(mean.read(name, slice(None)))}


def test_the_mean_of_the_last_checkpoints(save):
    run = save({1: 9.0, 2: 1.0, 3: 2.0, 4: 6.0})
    assert _values(upcycling.open_mean(sources.newest(run, 3))) == {3.0}  # (1 + 2 + 6) / 3
    assert _values(upcycling.open_mean(sources.newest(run, 2))) == {4.0}


def test_sums_are_wider_than_the_weights(save):
    # In float32, 2^24 + 1 is 2^24: the mean would be 2^24 / 3 + 1/3.
    run = save({1: 2.0**24, 2: 1.0, 3: 1.0})
    assert _values(upcycling.open_mean(sources.newest(run, 3))) == {float(np.float32((2**24 + 2) / 3))}


def test_the_written_mean_is_a_checkpoint_to_start_from(save, model, tmp_path):
    run = save({1: 1.0, 2: 2.0})
    result, text = upcycling.average_run(run, sources.newest(run, 2), tmp_path / "mean")
    assert result["steps"] == [1, 2] and result["num_parameters"] == model.config.num_parameters
    assert "the mean of steps 1 and 2 of" in text and f"--gin_file={tmp_path}/mean/model.gin" in text
    again = conversion.from_switch_tf(tmp_path / "mean")
    assert again.config == model.config and _values(weight_source.model_weights(again)) == {1.5}


def test_a_run_in_a_bucket(save, bucket):
    run = save({1: 1.0, 2: 2.0}, folder=bucket.new_folder())
    assert _values(upcycling.open_mean(sources.newest(run, 2))) == {1.5}


def test_checkpoints_of_different_models_are_refused_by_the_first_difference(save, model):
    save({1: 1.0})
    run = save({2: 2.0}, dataclasses.replace(model.config, activation="gelu"))
    with pytest.raises(ValueError, match="step_00000002 is of another model than .*step_00000001: "
                                         "SwitchConfig.activation was 'relu' and is 'gelu'. Average checkpoints of"):
        sources.check_same(sources.newest(run, 2))


def test_a_checkpoint_that_is_removed_meanwhile_is_named(save):
    run = save({1: 1.0, 2: 2.0})
    checkpoints = sources.newest(run, 2)
    whole_file.remove_tree(checkpoints[0])
    with pytest.raises(ValueError, match="step_00000001 was removed by its run before it was read"):
        StoredWeights(checkpoints[0])


def test_a_damaged_checkpoint_is_named(save):
    run = save({1: 1.0, 2: 2.0})
    file = next(folders.path_of(run / "checkpoints", 1).glob("state.data-*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(folders.BrokenCheckpoint, match="step_00000001 is damaged"):
        _values(upcycling.open_mean(sources.newest(run, 2)))


def test_too_few_checkpoints_are_refused(save):
    run = save({1: 1.0, 2: 2.0})
    with pytest.raises(ValueError, match="--last must be at most 2, the number of checkpoints in .*, not 3; a run"):
        sources.newest(run, 3)
