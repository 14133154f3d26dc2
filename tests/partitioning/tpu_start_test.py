"""Meshes, refusals and single devices on a machine with tensorflow-tpu, with fakes for calls that need a TPU.

The mesh is made by TensorFlow's own code for TPUs, from the places of four chips, and laid over CPU devices, so that a
step can be trained on it.
"""

import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.dtensor.python import config as dtensor_config
from tensorflow.dtensor.python import tpu_util
from tensorflow.experimental import dtensor

from switch_tf import SwitchTransformer, environment
from switch_tf.configs.run import StepSettings
from switch_tf.hardware import devices, host
from switch_tf.optim.adafactor import Adafactor
from switch_tf.partitioning import Layout, backends, cluster
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training.train_step import compile_steps

DATA = (("batch", "data"), ("group", "data"))
EXPERT = (*DATA, ("expert", "data"))
OVER_BOTH = (("batch", ("data", "expert")), ("group", ("data", "expert")), ("expert", "expert"))
# Chips of one host, in the order in which it numbers them.
CHIPS = [[[x, y, 0, 0] for y in (0, 1) for x in (0, 1)]]


@pytest.fixture
def started(monkeypatch):
    """A machine with four TPU chips and tensorflow-tpu; the list of accelerator systems that were started."""
    systems = []
    installed_version = environment.installed_version
    monkeypatch.setattr(environment, "installed_version",
                        lambda name: "2.20.0" if name == "tensorflow-tpu" else installed_version(name))
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    monkeypatch.setattr(devices, "device_type", lambda: "TPU")
    monkeypatch.setattr(dtensor, "initialize_accelerator_system", lambda kind, **options: systems.append(kind))
    for module, name in ((dtensor, "num_global_devices"), (dtensor_config, "num_global_devices"),
                         (dtensor_config, "num_local_devices")):
        monkeypatch.setattr(module, name, lambda kind: 4)
    topology = tf.tpu.experimental.Topology(mesh_shape=[2, 2, 1, 1], device_coordinates=np.array(CHIPS))
    monkeypatch.setattr(tpu_util, "_tpu_topology", topology)
    monkeypatch.setattr(tpu_util, "_dtensor_device", types.SimpleNamespace(
        tpu_core_locations_to_ids=lambda places: list(range(len(places))), set_tpu_core_ids=lambda name, ids: None))
    monkeypatch.setattr(tpu_util, "_TPU_DEVICE_TYPE", "CPU")
    for name in ("TF_CONFIG", "TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    return systems


def _trained(partitioner, config, batch):
    keras.utils.set_random_seed(1)
    model, optimizer = SwitchTransformer(config), Adafactor(0.01)
    partitioner.build(model, optimizer)
    step = compile_steps(model, optimizer, 3, StepSettings(), partitioner)
    means, bad_step = step(partitioner.place({name: value[None] for name, value in batch.items()}))
    assert int(bad_step) == -1
    finite = all(partitioner.are_finite(model.trainable_variables))
    return float(means.batch.loss_terms["cross_entropy"].value), finite


@pytest.mark.slow
def test_the_mesh_of_a_tpu_trains_the_step_of_one_device(started, shallow_config, batch):
    partitioner = backends.create_partitioner(Layout("", EXPERT, (("embed", "data"),)))
    assert started == ["TPU"] and not partitioner.mesh.use_xla_spmd()
    loss, is_finite = _trained(partitioner, shallow_config, batch)
    expected, _ = _trained(Partitioner(), shallow_config, batch)
    assert is_finite and loss == pytest.approx(expected, rel=1e-5)


def test_devices_of_a_mesh_are_neighbours_along_its_last_axis(started):
    mesh = backends.create_partitioner(Layout("data=2,model=2", (*DATA, ("mlp", "model")))).mesh
    places = dict(zip(mesh.local_device_ids(), CHIPS[0], strict=True))
    assert [places[device][:2] for device in range(4)] == [[0, 0], [1, 0], [0, 1], [1, 1]]


def test_activations_over_several_mesh_axes_are_refused_before_the_tpu_is_started(started):
    with pytest.raises(ValueError, match=r"The layout splits batch and group over several mesh axes at once, and "
                                         r"DTensor splits an axis of activations over one; use backend='pjrt', which "
                                         r"splits it over all of them, gin/layouts/expert\.gin"):
        backends.create_partitioner(Layout("data=2,expert=2", OVER_BOTH))
    assert not started
    with pytest.raises(ValueError, match="splits batch and group over several mesh axes"):
        backends.create_partitioner(Layout("data=2", OVER_BOTH))  # known once the open axis is


def test_stored_weights_may_lie_over_several_mesh_axes(started):
    layout = Layout("data=2,fsdp=2", EXPERT, (("mlp", ("data", "fsdp")),))
    assert backends.create_partitioner(layout).layout == layout


# One device of several.


def test_a_run_without_a_layout_splits_its_batch_over_all_chips(started, capsys):
    partitioner = backends.create_partitioner(Layout())
    assert (partitioner.layout.mesh, partitioner.layout.rules) == ({"data": 4}, DATA)
    assert "This run has no layout, so its batch is split over the 4 devices of the TPU" in capsys.readouterr().err


def test_a_mesh_of_one_device_with_rules_is_refused(started):
    with pytest.raises(ValueError, match="MESH_SHAPE 'data=1' is for one device, but a program on this TPU runs on all "
                                         "of its 4; make the product of its sizes 4"):
        backends.create_partitioner(Layout("data=1", EXPERT))


def test_commands_of_one_device_run_on_the_host(monkeypatch, capsys):
    monkeypatch.setattr(devices, "_chosen", None)
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    monkeypatch.setattr(environment, "installed_version", lambda name: "2.20.0")
    hidden = []
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *arguments: hidden.append(arguments))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    assert devices.device_type() == "TPU"
    devices.use_host("infer")
    assert hidden == [([], "TPU")] and devices.device_type() == "CPU"
    assert capsys.readouterr().err.startswith("`switch-tf infer` runs on the CPU of this TPU VM")
    assert type(backends.create_partitioner(Layout())) is Partitioner


def test_without_a_tpu_the_host_is_not_mentioned(monkeypatch, capsys):
    monkeypatch.setattr(devices, "_chosen", None)
    devices.use_host("infer")
    assert devices._chosen is None and capsys.readouterr().err == ""


def test_mirrored_is_not_for_a_tpu(started):
    with pytest.raises(ValueError, match="MirroredStrategy is for GPUs and CPUs; on a TPU use backend='tpu' or"):
        backends.create_partitioner(Layout("", DATA, backend="mirrored"))


# TPUStrategy.


@pytest.fixture
def strategies(monkeypatch, started):
    """Stands in for the TPU system of eight one-core chips; what strategies and resolvers were made of."""
    made = types.SimpleNamespace(resolved=[], strategies=[], connected=[])
    chips = np.array([[[x, y, 0, 0] for y in range(4) for x in range(2)]])
    topology = tf.tpu.experimental.Topology(mesh_shape=[2, 4, 1, 1], device_coordinates=chips)
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver",
                        lambda tpu: made.resolved.append(tpu) or tpu)
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", made.connected.append)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda resolver: topology)

    def strategy(resolver, experimental_device_assignment):
        made.strategies.append(experimental_device_assignment)
        replicas = 8 if experimental_device_assignment is None else experimental_device_assignment.num_replicas
        return types.SimpleNamespace(num_replicas_in_sync=replicas)

    monkeypatch.setattr(tf.distribute, "TPUStrategy", strategy)
    return made


def test_a_named_tpu_is_not_asked_for_where_the_chips_are_local(strategies, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    backends.create_partitioner(Layout("", DATA, backend="tpu"))
    assert strategies.resolved == ["local"] and not strategies.connected
    monkeypatch.setattr(host, "has_tpu", lambda: False)
    backends.create_partitioner(Layout("", DATA, backend="tpu"))
    assert strategies.resolved == ["local", "my-tpu"] and strategies.connected == ["my-tpu"]


def test_every_core_has_a_replica_unless_the_mesh_has_one_device(strategies):
    partitioner = backends.create_partitioner(Layout("", DATA, backend="tpu"))
    assert (partitioner.num_parts, partitioner.layout.mesh) == (8, {"data": 8})
    assert backends.create_partitioner(Layout("data=1", DATA, backend="tpu")).num_parts == 1
    assert [assignment and assignment.num_cores_per_replica for assignment in strategies.strategies] == [None, 1]
    with pytest.raises(ValueError, match="MESH_SHAPE 'data=3' is for 3 devices, but there are 8 .TPU."):
        backends.create_partitioner(Layout("data=3", DATA, backend="tpu"))


def test_one_device_is_one_core(strategies):
    partitioner = backends.create_partitioner(Layout(backend="one_device"))
    [assignment] = strategies.strategies
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (1, 1)
    assert partitioner.num_parts == 1


@pytest.mark.parametrize("by", ["TF_CONFIG", "TPU_WORKER_HOSTNAMES"])
def test_several_hosts_are_refused(strategies, monkeypatch, by):
    if by == "TF_CONFIG":
        variables = {}
        cluster.put(variables, ["a:1", "b:1"], 0)
        monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
        assert json.loads(variables["TF_CONFIG"])["task"]["index"] == 0
    else:
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
        monkeypatch.setenv("TPU_WORKER_ID", "0")
    with pytest.raises(ValueError, match="backend='tpu' trains in one process, on the devices of one host, but this "):
        backends.create_partitioner(Layout("", DATA, backend="tpu"))
    assert not strategies.resolved


def test_xla_is_refused_for_replicas(strategies, shallow_config):
    partitioner = backends.create_partitioner(Layout("", DATA, backend="tpu"))
    with pytest.raises(ValueError, match="use_xla=True compiles the step of one device"):
        partitioner.check(shallow_config, 1, True)
    partitioner.check(shallow_config, 4, False)
