"""A layout and the devices decide which partitioner a run gets; what does not fit is refused before anything starts.

TensorFlow's devices cannot be changed once it has started them, so two processes of their own make theirs here.
"""

import json
import os
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from switch_tf import environment
from switch_tf.hardware import devices, host
from switch_tf.partitioning import Layout, backends, cluster
from switch_tf.partitioning.layout import BACKENDS
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal

DATA = (("batch", "data"), ("group", "data"))
EXPERT = (*DATA, ("expert", "data"))

# What both processes start with: `make` says which partitioner a layout gets, or why it is refused.
_START = """
import json, os
from switch_tf.hardware import host
from switch_tf.hardware import devices
from switch_tf.partitioning import Layout, backends

host.skip_tpu_metadata_query()
DATA = (("batch", "data"), ("group", "data"))

def refusal(function, *arguments):
    try:
        return "not refused: " + str(function(*arguments))
    except ValueError as error:
        return str(error)

def make(mesh_shape, rules=DATA, backend="auto"):
    partitioner = backends.create_partitioner(Layout(mesh_shape, rules, backend=backend))
    mesh = getattr(partitioner, "mesh", None)
    return {"class": type(partitioner).__name__, "mesh": partitioner.layout.mesh, "num_parts": partitioner.num_parts,
            "devices": [name[-5:] for name in mesh.local_devices()] if mesh else None,
            "num_processors": partitioner.num_processors, "is_chief": partitioner.is_chief}
"""

_FOUR_DEVICES = _START + """
devices.split_cpu(4)
result = {
    "too few": refusal(make, "data=8"),
    "too many": refusal(make, "data=3"),
    "auto": make(""),
    "two axes": make("model=2", (*DATA, ("mlp", "model"))),
    "first of four": make("data=1"),
    "dtensor on one": make("data=1", DATA, "dtensor"),
    "mirrored": make("", DATA, "mirrored"),
    "mirrored on one": make("data=1", DATA, "mirrored"),
    "too late": refusal(devices.split_cpu, 2),
    "no devices": refusal(devices.split_cpu, 0),
}
print(json.dumps(result))
"""

_PROCESSES = _START + """
devices.split_cpu(2)
result = {
    "dtensor": refusal(make, "data=3"),
    "mirrored": refusal(make, "", DATA, "mirrored"),
}
devices.split_cpu(1)  # raises if a refusal came after the devices were started
print(json.dumps(result))
"""


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def four_devices():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CONFIG", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return run(_FOUR_DEVICES)


@pytest.fixture(scope="module")
def two_processes():
    """Results in the second of two processes, while the first never starts."""
    with pytest.MonkeyPatch.context() as patch:
        variables = {}
        cluster.put(variables, ["127.0.0.1:1", "127.0.0.1:2"], 1)
        patch.setenv("TF_CONFIG", variables["TF_CONFIG"])
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return run(_PROCESSES)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("TF_CONFIG", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)


# What one gets.


@pytest.mark.parametrize("layout", [Layout(), Layout("data=1", EXPERT)])
def test_a_mesh_of_one_device_needs_no_strategy(layout):
    partitioner = backends.create_partitioner(layout)
    assert type(partitioner) is Partitioner
    assert partitioner.layout == layout.resolve(1, "CPU")
    assert (partitioner.num_processes, partitioner.is_chief) == (1, True)


@pytest.mark.slow
def test_the_first_of_many_devices_is_used_where_the_mesh_is_one(four_devices):
    assert four_devices["first of four"]["class"] == "Partitioner"
    assert four_devices["dtensor on one"]["class"] == "DTensorPartitioner"
    assert four_devices["dtensor on one"]["devices"] == ["CPU:0"]
    assert four_devices["mirrored on one"]["num_parts"] == 1


@pytest.mark.slow
def test_many_devices_are_dtensors_by_default(four_devices):
    auto = four_devices["auto"]
    assert (auto["class"], auto["mesh"]) == ("DTensorPartitioner", {"data": 4})
    assert auto["devices"] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    # One program: nothing is computed in parts. The devices are one machine's CPU, which is measured once.
    assert (auto["num_parts"], auto["num_processors"], auto["is_chief"]) == (1, 1, True)
    assert four_devices["two axes"]["mesh"] == {"data": 2, "model": 2}


@pytest.mark.slow
def test_mirrored_has_a_replica_on_each_device(four_devices):
    mirrored = four_devices["mirrored"]
    assert (mirrored["class"], mirrored["mesh"]) == ("StrategyPartitioner", {"data": 4})
    assert mirrored["num_parts"] == 4


# A back end from outside.


def test_a_back_end_is_one_file_and_one_line(tmp_path, monkeypatch):
    (tmp_path / "stub_back_end.py").write_text("""
from switch_tf.partitioning.partitioner import Partitioner

class StubPartitioner(Partitioner):
    num_processors = 7

def create(layout, members):
    return StubPartitioner(layout.resolve(len(members.addresses), "stub"))
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(BACKENDS, "stub", "stub_back_end")
    partitioner = backends.create_partitioner(Layout("", DATA, backend="stub"))
    assert (partitioner.layout.mesh, partitioner.num_processors) == ({"data": 1}, 7)
    double = partitioner.compile(partitioner.results(lambda features: 2 * features["ids"]))
    assert double({"ids": tf.constant([[[1, 2]]])}).numpy().tolist() == [[2, 4]]
    with pytest.raises(ValueError, match="'tpu', 'stub', not 'stab'. Did you mean 'stub'?"):
        Layout(backend="stab")


# GPUs, faked by CPU devices.


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that fakes a machine with `count` GPUs, and a list of what was started, in order."""
    started = []

    def make(count):
        monkeypatch.setattr(devices, "device_type", lambda: "GPU")
        monkeypatch.setattr(dtensor, "num_local_devices", lambda kind: count)
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: pytest.fail("devices were started"))
        monkeypatch.setattr(dtensor, "initialize_accelerator_system", lambda kind: started.append(
            (kind, os.environ["DTENSOR_GPU_USE_NCCL_COMMUNICATION"])))
        create = dtensor.create_mesh
        monkeypatch.setattr(dtensor, "create_mesh", lambda dims, devices: started.append(devices) or create(
            dims, devices=[name.replace("GPU", "CPU") for name in devices]))

    monkeypatch.setenv("DTENSOR_GPU_USE_NCCL_COMMUNICATION", "set by a test")
    monkeypatch.delenv("DTENSOR_GPU_USE_NCCL_COMMUNICATION")
    return make, started


def test_several_gpus_are_started_with_nccl_before_the_mesh(gpus):
    make, started = gpus
    make(2)
    partitioner = backends.create_partitioner(Layout("", EXPERT))
    assert started == [("GPU", "1"), ["GPU:0", "GPU:1"]] and partitioner.layout.mesh == {"data": 2}


@pytest.mark.parametrize("layout", [Layout(), Layout("", DATA)])
def test_one_gpu_needs_no_accelerator_system(gpus, layout):
    make, started = gpus
    make(1)
    assert type(backends.create_partitioner(layout)) is Partitioner and not started


# Errors of processes that are gone, and of buckets.


@pytest.mark.parametrize("kind, message, is_lost", [
    (tf.errors.UnavailableError, "failed to connect to all addresses", True),
    (tf.errors.AbortedError, "Stale barrier", True),
    (tf.errors.InternalError, "Collective ops is aborted by: gs://b", True),
    (tf.errors.InternalError, "out of memory", False),
    (tf.errors.AbortedError, "All 10 retry attempts failed. The last failure: Error executing an HTTP request: HTTP "
                             "response code 503 when initiating an upload to gs://b/step_10/part", False),
    (tf.errors.UnavailableError, "Error executing an HTTP request: libcurl code 6 meaning 'Couldn't resolve host name'",
     False)])
def test_a_bucket_that_fails_is_no_lost_process(kind, message, is_lost):
    partitioner = Partitioner()
    assert not partitioner.is_lost_process(kind(None, None, message))
    partitioner.num_processes = 2
    assert partitioner.is_lost_process(kind(None, None, message)) is is_lost
    assert not partitioner.is_lost_process(OSError(message))


# Refusals.


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_devices_is_refused(four_devices):
    assert four_devices["too few"] == (
        "MESH_SHAPE 'data=8' is for 8 devices, but there are 4 (CPU); make the product of its sizes 4, or have 8 "
        "virtual devices on this machine's CPU with --devices=8.")
    assert four_devices["too many"].startswith("MESH_SHAPE 'data=3' is for 3 devices, but there are 4 (CPU);")


@pytest.mark.slow
def test_the_cpu_is_divided_before_it_is_used(four_devices):
    assert four_devices["too late"] == "The CPU cannot be made 2 devices after TensorFlow has used it; do it first."
    assert four_devices["no devices"] == "A number of devices is at least 1, not 0."


@pytest.mark.slow
def test_a_mesh_is_laid_over_the_devices_of_all_processes(two_processes):
    # Two processes of two devices; it is refused at once, and not by waiting for the other process.
    assert two_processes["dtensor"].startswith("MESH_SHAPE 'data=3' is for 3 devices, but there are 4 (CPU);")


@pytest.mark.slow
def test_mirrored_trains_in_one_process(two_processes):
    assert two_processes["mirrored"] == (
        "backend='mirrored' trains in one process, on the devices of one host, but this run has 2 processes, and each "
        "would train a model of its own; use backend='pjrt'.")


@pytest.mark.parametrize(("rules", "at_rest_rules", "split"), [
    (EXPERT, (), "expert"), ((*DATA, ("vocab", "data"), ("mlp", "data")), (), "mlp, vocab"),
    (DATA, (("embed", "data"),), "embed")])
def test_tf_distribute_copies_the_model_so_only_the_batch_is_split(rules, at_rest_rules, split):
    with pytest.raises(ValueError) as raised:
        backends.create_partitioner(Layout("data=1", rules, at_rest_rules, "mirrored"))
    assert str(raised.value) == (
        f"backend='mirrored' copies the model to every device, so the layout cannot split {split}; use "
        "gin/layouts/data.gin, or backend='pjrt'.")


def test_the_strategy_of_several_processes_names_what_covers_it():
    with pytest.raises(Refusal) as raised:
        Layout("", DATA, backend="multi_worker_mirrored")
    assert str(raised.value) == (
        "backend='multi_worker_mirrored' is gone: PJRT trains in several processes and stores pieces of the variables; "
        "use backend='pjrt', which reads the same checkpoints.")


def test_a_tpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(host, "has_tpu", lambda: False)
    with pytest.raises(ValueError) as raised:
        backends.create_partitioner(Layout("", DATA, backend="tpu"))
    assert str(raised.value) == (
        "backend='tpu' needs a TPU, and this machine has none: run it on a TPU VM, name a TPU with TPU_NAME, or leave "
        "backend at 'auto'.")


@pytest.mark.parametrize("is_named", [False, True])
def test_a_tpu_core_keeps_its_variables_whole(monkeypatch, is_named):
    monkeypatch.setattr(environment, "installed_version", lambda name: "2.20.0")
    monkeypatch.setattr(host, "has_tpu", lambda: not is_named)
    if is_named:
        monkeypatch.setenv("TPU_NAME", "mine")
    message = (r"backend='tpu' copies the model to every device, so the layout cannot split {}; use "
               r"gin/layouts/data\.gin, or backend='pjrt'\.$")
    with pytest.raises(ValueError, match=message.format("expert")):
        backends.create_partitioner(Layout("", EXPERT, backend="tpu"))
    with pytest.raises(ValueError, match=message.format("embed")):
        backends.create_partitioner(Layout("", DATA, (("embed", "data"),), "tpu"))
    with pytest.raises(ValueError, match=message.format("expert, heads")):
        backends.create_partitioner(
            Layout("model=2", (*DATA, ("heads", "model"), ("expert", "model")), backend="tpu"))


def test_tf_config_that_cannot_be_read_is_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "host0:2222")
    with pytest.raises(ValueError, match="TF_CONFIG must read like "):
        backends.create_partitioner(Layout())


@pytest.mark.parametrize(("module", "name", "value", "message"), [
    (keras.backend, "backend", "jax", "with TensorFlow, and Keras computes with 'jax'; set KERAS_BACKEND=tensorflow"),
    (keras.config, "floatx", "float16", "floatx must be 'float32', not 'float16'; correct ~/.keras/keras.json")])
def test_another_choice_of_keras_is_refused(monkeypatch, module, name, value, message):
    monkeypatch.setattr(module, name, lambda: value)
    with pytest.raises(Refusal, match=message):
        Partitioner()
