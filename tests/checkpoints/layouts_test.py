"""Checkpoints do not depend on the layout, and a step that diverges under one changes nothing and is located."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf import SwitchTransformer, data
from switch_tf.checkpoints import bundles, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.checkpoints.folders import path_of
from switch_tf.configs.run import StepSettings
from switch_tf.partitioning.variables import pack, stored, unfolding_of
from switch_tf.storage import places
from switch_tf.training import train_step
from switch_tf.training.train_step import compile_steps

PIECES, OTHER_PIECES = {"name": "expert_model", "mesh_shape": "data=2,model=2"}, {
    "name": "fully_sharded", "mesh_shape": "data=4"}
SEVERAL = {"name": "fully_sharded", "mesh_shape": "data=2,x=2,y=2", "at_rest_rules": (
    ("vocab", ("data", "x", "y")), ("mlp", ("y", "x", "data")), ("kv", ("x", "y")), ("expert_mlp", ("x", "y")))}
REPLICAS = {"name": "data", "mesh_shape": "data=2", "backend": "mirrored"}
ONE = {"name": "single"}
PJRT = {"name": "fully_sharded_experts", "mesh_shape": "fsdp=2,data=2,expert=2", "backend": "pjrt"}
PJRT_ONE = {"name": "single", "backend": "pjrt"}


class _Run:
    def __init__(self, partitioner, config, seed):
        keras.utils.set_random_seed(seed)
        self.model, self.optimizer = SwitchTransformer(config), keras.optimizers.Adam(0.01, name="adam")
        partitioner.build(self.model, self.optimizer)
        self.partitioner = partitioner
        self.variables = tensors.state_variables(self.model, self.optimizer)
        self._step = compile_steps(self.model, self.optimizer, 3, StepSettings(), partitioner)

    def step(self, batch):
        means, bad_step = self._step(self.partitioner.place({name: value[None] for name, value in batch.items()}))
        return float(means.batch.loss_terms["cross_entropy"].value), int(bad_step)

    def save(self, folder, step):
        checkpointer = Checkpointer(folder, self.variables, _batches(), self.partitioner, keep=3)
        checkpointer.save(step)
        checkpointer.wait()
        return path_of(folder, step)

    def values(self):
        return {path: _whole(variable) for path, variable in self.variables.items()}


def _whole(variable):
    held = stored(variable)
    if not isinstance(held, dtensor.DVariable):
        return held.numpy()
    replicated = dtensor.Layout.replicated(held.layout.mesh, held.shape.rank)
    value = dtensor.unpack(dtensor.relayout(held.read_value(), replicated))[0].numpy()
    return unfolding_of(variable).fold(value, np)


def _batches():
    return data.Batches({None: iter(tf.data.Dataset.range(9))}, batch_size=1)


@pytest.mark.parametrize("portion", [2**28, 2**12])
def test_devices_of_pjrt_get_their_slices_by_few_looks_at_the_files(portion, make_partitioner, shallow_config, bucket,
                                                                    monkeypatch):
    """Each took six requests for each slice of each variable."""
    folder = places.at(bucket.new_folder())
    saved, restored = (_Run(make_partitioner(**PJRT), shallow_config, seed) for seed in (1, 2))
    path = saved.save(folder, 1)
    looks, read = [], bundles.read
    monkeypatch.setattr(bundles, "read", lambda prefix, slices: looks.append(len(slices)) or read(prefix, slices))
    monkeypatch.setattr(tensors, "_PORTION", portion)
    before = bucket.control()["requests"]
    tensors.restore(path, restored.variables)
    num_requests = bucket.control()["requests"] - before
    assert len(saved.variables) > 60 and (len(looks) == 1 and num_requests < 40 if portion > 2**12 else len(looks) > 9)
    for name, value in saved.values().items():
        np.testing.assert_array_equal(restored.values()[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("one, other", [
    pytest.param(PIECES, ONE, marks=pytest.mark.exhaustive),
    pytest.param(PIECES, OTHER_PIECES, marks=pytest.mark.exhaustive), (REPLICAS, PIECES),
    pytest.param(SEVERAL, OTHER_PIECES, marks=pytest.mark.exhaustive),
    pytest.param(ONE, SEVERAL, marks=pytest.mark.exhaustive),
    pytest.param(OTHER_PIECES, REPLICAS, marks=pytest.mark.exhaustive),
    (PJRT, ONE), (SEVERAL, PJRT), pytest.param(PJRT_ONE, REPLICAS, marks=pytest.mark.exhaustive),
    pytest.param(PJRT, PJRT_ONE, marks=pytest.mark.exhaustive)],
    ids=lambda layout: "_".join(map(str, layout.values())))
def test_a_run_goes_on_under_another_layout_and_comes_back(one, other, make_partitioner, shallow_config, batch,
                                                           tmp_path):
    first, second = (_Run(make_partitioner(**layout), shallow_config, seed)
                     for seed, layout in enumerate((one, other), 1))
    first.step(batch)
    for step, (saved, restored) in enumerate([(first, second), (second, first)], 1):
        saved.step(batch)  # ahead of the other one
        tensors.restore(saved.save(tmp_path, step), restored.variables, _batches())
        expected = saved.values()
        for name, value in restored.values().items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
        assert restored.step(batch)[0] == pytest.approx(saved.step(batch)[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    PIECES, SEVERAL, REPLICAS, PJRT, pytest.param(ONE, marks=pytest.mark.exhaustive),
    pytest.param(PJRT_ONE, marks=pytest.mark.exhaustive)], ids=lambda layout: "_".join(map(str, layout.values())))
def test_a_save_under_way_has_the_values_that_tensorflow_would_have_written(layout, make_partitioner, shallow_config,
                                                                           batch, tmp_path, monkeypatch):
    """The step goes on, in donated memory, before the thread writes anything."""
    run, has_gone_on, write = _Run(make_partitioner(**layout), shallow_config, 1), threading.Event(), bundles.write
    run.step(batch)
    tf.train.Checkpoint(state={path: stored(variable) for path, variable in run.variables.items()}).write(
        str(tmp_path / "expected"))

    def late(*args):
        assert has_gone_on.wait(600)
        return write(*args)

    monkeypatch.setattr(bundles, "write", late)
    checkpointer = Checkpointer(tmp_path, run.variables, _batches(), run.partitioner)
    checkpointer.save(1)
    for _ in range(2):
        run.step(batch)
    has_gone_on.set()
    checkpointer.wait()
    expected, found = (tf.train.load_checkpoint(str(prefix))
                       for prefix in (tmp_path / "expected", path_of(tmp_path, 1) / "state"))
    shapes = expected.get_variable_to_shape_map()
    assert found.get_variable_to_shape_map() == shapes and len(shapes) == len(run.variables) + 1
    for key in shapes.keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}:
        np.testing.assert_array_equal(found.get_tensor(key), expected.get_tensor(key), err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [PIECES, REPLICAS, PJRT], ids=lambda layout: layout["name"])
def test_a_step_that_diverges_changes_nothing_and_is_located(layout, make_partitioner, shallow_config, batch, tmp_path):
    run = _Run(make_partitioner(**layout), shallow_config, seed=1)
    bad = run.model.encoder.layers[0].mlp.experts.wo
    bad.value.assign(_like(bad.value, np.full(bad.shape, np.nan, np.float32), run.partitioner))
    before = run.values()
    assert run.step(batch)[1] == 0
    for name, value in run.values().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    found = train_step.first_bad_tensor(run.model, batch, 3, 0, StepSettings(), run.partitioner)
    assert found == "the weight encoder/layers_0/mlp/experts/wo"
    with pytest.raises(tensors.BrokenCheckpoint, match="model/encoder/layers_0/mlp/experts/wo is not finite"):
        run.save(tmp_path, 1)


def _like(variable, value, partitioner):
    return pack(value, variable.layout) if isinstance(variable, dtensor.DVariable) else value
