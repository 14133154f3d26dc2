"""TF_CONFIG is read, written and told to DTensor; what it cannot mean is refused in one sentence."""

import json
import os

import pytest
from tensorflow.experimental import dtensor

from switch_tf.partitioning import cluster
from switch_tf.partitioning.cluster import Cluster

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


def test_a_slice_of_one_host_is_alone(environ):
    environ.update(TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
    assert cluster.members() == Cluster(("localhost",), 0)


@pytest.mark.parametrize("index", ["", "2", "-1", "first"])
def test_a_host_of_a_slice_has_to_know_which_it_is(environ, index):
    environ.update(TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID=index)
    with pytest.raises(ValueError, match="2 hosts, so TPU_WORKER_ID must say which one this is, from 0 to 1, not"):
        cluster.members()


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
    assert cluster.num_hosts(Cluster(addresses, 0)) == hosts


def test_dtensor_is_told_the_same(environ):
    cluster.configure_dtensor(Cluster(TWO, 1))
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
