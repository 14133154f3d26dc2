"""The processes of a run are read from TF_CONFIG, GKE's variables or a TPU VM's metadata, and passed on to DTensor."""

import json
import os
import socket

import pytest
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster
from tensorflow.experimental import dtensor

from switch_tf.hardware import host
from switch_tf.partitioning import cluster
from switch_tf.partitioning.backends.dtensor import create
from switch_tf.partitioning.cluster import Cluster
from switch_tf.partitioning.layout import Layout
from switch_tf.training import processes

TWO = ("host0:2222", "host1:2222")


def config(workers=TWO, **task):
    return json.dumps({"cluster": {"worker": workers}, "task": task})


@pytest.fixture
def environ(monkeypatch):
    """Environment variables of the test's own, none at first."""
    variables = {}
    monkeypatch.setattr(os, "environ", variables)
    return variables


@pytest.mark.parametrize("variables", [{}, {"TF_CONFIG": ""}])
def test_without_tf_config_a_process_is_alone(environ, variables):
    environ.update(variables)
    assert cluster.members() == Cluster(("localhost",), 0)


def test_tf_config_names_all_processes_in_order_and_this_one(environ):
    environ["TF_CONFIG"] = config(["b:1", "a:2", "b:3"], type="worker", index=2)
    assert cluster.members() == Cluster(("b:1", "a:2", "b:3"), 2)


def test_an_index_may_be_text_and_the_type_may_be_left_out(environ):
    environ["TF_CONFIG"] = config(index="1")
    assert cluster.members() == Cluster(TWO, 1)


def test_the_hosts_of_a_tpu_slice_meet_at_a_port_that_is_not_libtpus(environ):
    environ.update(TPU_WORKER_HOSTNAMES="10.0.0.2, 10.0.0.3", TPU_WORKER_ID="1")
    assert cluster.members() == Cluster(("10.0.0.2:19011", "10.0.0.3:19011"), 1)
    environ["TF_CONFIG"] = config(index=0)  # comes first
    assert cluster.members() == Cluster(TWO, 0)


def test_the_nodes_of_a_slurm_step_meet(environ, tmp_path):
    """scontrol is a script here, because this machine has no Slurm."""
    environ.update(PATH=str(tmp_path), SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="gpu[1-2]", SLURM_PROCID="1")
    with pytest.raises(ValueError, match=r"scontrol show hostnames gpu\[1-2\]` does not name.*TF_CONFIG"):
        cluster.members()
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[1-2]" ] && printf "gpu1\\ngpu2\\n"\n')
    script.chmod(0o755)
    assert cluster.members() == Cluster(("gpu1:19011", "gpu2:19011"), 1)
    environ["SLURM_STEP_NUM_TASKS"] = "4"
    with pytest.raises(ValueError, match="one process on each node.*not 4 on 2; use --ntasks-per-node=1"):
        cluster.members()
    environ["SLURM_STEP_NUM_TASKS"] = "1"  # also within the script of a job of several nodes
    assert cluster.members() == Cluster(("localhost",), 0)


def test_a_slice_of_one_host_is_alone(environ):
    environ.update(TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
    assert cluster.members() == Cluster(("localhost",), 0)


@pytest.mark.parametrize("index", ["", "2", "-1", "first"])
def test_a_host_of_a_slice_has_to_know_which_it_is(environ, index):
    environ.update(TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID=index)
    with pytest.raises(ValueError, match="2 hosts, so TPU_WORKER_ID must say which one this is, from 0 to 1, not"):
        cluster.members()


@pytest.fixture
def tpu_vm(environ, metadata_server, monkeypatch):
    """A function that makes this machine a TPU VM with a metadata server; returns the paths that it is asked for."""

    def make(**attributes):
        address, asked = metadata_server(**attributes)
        environ.update(GCE_METADATA_HOST=address, GCE_METADATA_IP=address)  # of this package, and of JAX
        return asked

    monkeypatch.setattr(host, "has_tpu", lambda: True)
    monkeypatch.setattr(host, "_TIMEOUT", 60)
    host.vm_attribute.cache_clear()
    yield make
    host.vm_attribute.cache_clear()


@pytest.mark.parametrize("endpoints", ["10.0.0.2,10.0.0.3", "switch:8470:10.0.0.2,switch:8470:10.0.0.3"])
def test_the_hosts_of_a_tpu_vm_are_those_that_jax_finds(tpu_vm, endpoints):
    asked = tpu_vm(agent_worker_number="1", worker_network_endpoints=endpoints, tpu_env="ZONE: 'us-west4-a'\n")
    assert cluster.members() == cluster.members() == Cluster(("10.0.0.2:19011", "10.0.0.3:19011"), 1)
    assert len(asked) == 3  # each attribute once
    assert GceTpuCluster._get_worker_list_in_slice() == ["10.0.0.2", "10.0.0.3"]
    assert (GceTpuCluster.get_process_id(), GceTpuCluster.get_process_count()) == (1, 2)


def test_variables_come_before_the_metadata(tpu_vm, environ):
    asked = tpu_vm(agent_worker_number="1", worker_network_endpoints="10.0.0.2,10.0.0.3")
    environ.update(TPU_WORKER_HOSTNAMES="localhost")
    assert cluster.members() == Cluster(("localhost",), 0)
    environ["TF_CONFIG"] = config(index=0)
    assert cluster.members() == Cluster(TWO, 0) and not asked


def test_a_tpu_of_one_host_or_without_metadata_is_alone(tpu_vm, environ):
    tpu_vm(agent_worker_number="0", worker_network_endpoints="10.0.0.2", tpu_env="")
    assert cluster.members() == Cluster(("localhost",), 0)
    host.vm_attribute.cache_clear()
    environ["GCE_METADATA_HOST"] = "127.0.0.1:1"  # nobody listens
    assert cluster.members() == Cluster(("localhost",), 0)


@pytest.mark.parametrize("variables", [
    {}, {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"},
    {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "localhost"}], ids=["metadata", "gke", "gke, one host"])
def test_several_slices_need_tf_config(tpu_vm, environ, variables):
    tpu_vm(agent_worker_number="0", worker_network_endpoints="10.0.0.2,10.0.0.3",
           tpu_env="MEGASCALE_SLICE_ID: '0'\nMEGASCALE_NUM_SLICES: '2'\n")
    environ.update(variables)
    with pytest.raises(ValueError, match="This TPU is one of 2 slices .MEGASCALE_NUM_SLICES., and each slice would "
                                         "train a model of its own; name the hosts of all slices in TF_CONFIG"):
        cluster.members()
    environ["TF_CONFIG"] = config(index=0)
    assert cluster.members() == Cluster(TWO, 0)


def test_a_port_that_the_first_process_cannot_listen_at_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ValueError, match="cannot listen at port"):
        cluster.listening_address(f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ValueError, match="must be host:port"):
        cluster.listening_address("localhost")


@pytest.mark.parametrize(("host", "expected"), [
    ("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]"),
    # No interface of this machine: TEST-NET-1, and a name that nobody resolves.
    ("192.0.2.1", "[::]"), ("nobody.invalid", "[::]")])
def test_the_first_process_listens_at_its_own_address_alone(host, expected):
    (port,) = processes.free_ports(1)
    assert cluster.listening_address(f"{host}:{port}") == f"{expected}:{port}"


def test_what_put_writes_members_reads(environ):
    other = {"PATH": "/bin"}
    cluster.put(other, list(TWO), 1)
    assert json.loads(other["TF_CONFIG"]) == {"cluster": {"worker": ["host0:2222", "host1:2222"]},
                                              "task": {"type": "worker", "index": 1}}
    assert other["PATH"] == "/bin"
    assert cluster.members() == Cluster(("localhost",), 0)  # only the given dictionary was written to
    environ.update(other)
    assert cluster.members() == Cluster(TWO, 1)


@pytest.mark.parametrize(("addresses", "hosts"), [
    (("localhost",), 1),
    (("127.0.0.1:2222", "127.0.0.1:2223"), 1),
    (("host0:2222", "host1:2222", "host0:2223"), 2),
    (("[::1]:2222", "[::1]:2223", "[::2]:2222"), 2)])
def test_machines_are_counted_by_the_names_before_the_ports(addresses, hosts):
    assert Cluster(addresses, 0).num_hosts == hosts


def test_dtensor_is_told_the_same(environ):
    with pytest.raises(ValueError, match="MESH_SHAPE 'data=99' is for 99 devices"):
        create(Layout("data=99", (("batch", "data"),), backend="dtensor"), Cluster(TWO, 1))
    assert {name: value for name, value in environ.items() if name.startswith("DTENSOR_")} == {
        "DTENSOR_JOB_NAME": "worker", "DTENSOR_JOBS": "host0:2222,host1:2222", "DTENSOR_CLIENT_ID": "1",
        "DTENSOR_NUM_CLIENTS": "2"}
    assert (dtensor.num_clients(), dtensor.client_id()) == (2, 1)
    assert dtensor.full_job_name() == "worker/replica:0/task:1"


@pytest.mark.parametrize(("text", "reason"), [
    ("host0:2222,host1:2222", "JSONDecodeError: Expecting value"),
    ("[]", "TypeError: list indices"),
    ("null", "TypeError: 'NoneType'"),
    (json.dumps({"task": {"index": 0}}), "KeyError: 'cluster'"),
    (json.dumps({"cluster": {"ps": ["a:1"]}, "task": {"index": 0}}), "KeyError: 'worker'"),
    (json.dumps({"cluster": {"worker": TWO}}), "KeyError: 'task'"),
    (config(type="worker"), "KeyError: 'index'"),
    (config(type="worker", index="first"), "ValueError: invalid literal for int"),
    (config(type="worker", index=2), "ValueError: task {'type': 'worker', 'index': 2}"),
    (config(type="worker", index=-1), "ValueError: task {'type': 'worker', 'index': -1}"),
    (config(type="chief", index=0), "ValueError: task {'type': 'chief', 'index': 0}"),
    (config([], type="worker", index=0), "ValueError: task {'type': 'worker', 'index': 0}")])
def test_what_cannot_be_read_is_refused_with_an_example_and_the_reason(environ, text, reason):
    environ["TF_CONFIG"] = text
    with pytest.raises(ValueError) as raised:
        cluster.members()
    message = str(raised.value)
    assert message.startswith(
        'TF_CONFIG must read like {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", '
        f'"index": 0}}}}, with workers only, not {text!r} ({reason}')
    assert message.endswith(").") and "\n" not in message
