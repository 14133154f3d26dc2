"""TPUStrategy, refusals and single devices on a machine with tensorflow-tpu, with fakes for calls that need a TPU."""

import dataclasses
import json
import types

import numpy as np
import pytest
import tensorflow as tf

from switch_tf import SwitchConfig, environment
from switch_tf.hardware import devices, host
from switch_tf.partitioning import Layout, backends, cluster
from switch_tf.partitioning.partitioner import Partitioner

DATA = (("batch", "data"), ("group", "data"))


@pytest.fixture
def on_tpu(monkeypatch):
    """A machine with TPU chips and tensorflow-tpu."""
    installed_version = environment.installed_version
    monkeypatch.setattr(environment, "installed_version",
                        lambda name: "2.20.0" if name == "tensorflow-tpu" else installed_version(name))
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    monkeypatch.setattr(devices, "device_type", lambda: "TPU")
    for name in ("TF_CONFIG", "TPU_NAME", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")


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


def test_mirrored_is_not_for_a_tpu(on_tpu):
    with pytest.raises(ValueError, match="MirroredStrategy is for GPUs and CPUs; on a TPU use backend='tpu'"):
        backends.create_partitioner(Layout("", DATA, backend="mirrored"))


# TPUStrategy.


@pytest.fixture
def strategies(monkeypatch, on_tpu):
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


def test_a_model_that_finds_no_room_on_a_core_is_refused(strategies, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v2-8")
    partitioner, config = backends.create_partitioner(Layout("", DATA, backend="tpu")), SwitchConfig.from_preset(
        "switch_base_8")
    partitioner.check(config, 1, False)
    with pytest.raises(ValueError, match=r"would store .* GiB of weights and gradients, and has 8\.0 GiB"):
        partitioner.check(dataclasses.replace(config, num_experts=64), 1, False)
