"""PJRT is the default on TPUs and GPUs that JAX has a client for; its client for CPUs stands for theirs here."""

import dataclasses
import os

import jax
import pytest
import tensorflow as tf

from switch_tf import Experiment, environment, experiments
from switch_tf.hardware import devices, host
from switch_tf.ops import dtypes
from switch_tf.partitioning import Layout, backends, cluster
from switch_tf.partitioning.backends import dtensor, pjrt_client
from switch_tf.partitioning.backends.pjrt import PjrtPartitioner
from switch_tf.partitioning.backends.strategies import StrategyPartitioner
from switch_tf.partitioning.partitioner import Partitioner

DATA = (("batch", "data"), ("group", "data"))
RUN = [f"gin/{file}.gin" for file in ("models/switch_tiny", "tasks/docs_corpus", "runs/pretrain")]
BIND = ["MODEL_DIR='unused'"]


def _run(*files):
    return Experiment.from_gin([*RUN, *files], BIND)


@pytest.fixture
def accelerated(monkeypatch):
    """Function that makes JAX's devices of the CPU pass for a kind; returns a list of what TensorFlow must not see."""
    hidden = []
    monkeypatch.setattr(devices, "_chosen", None)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *arguments: hidden.append(arguments))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    before = jax.config.jax_compilation_cache_dir

    def pass_for(kind):
        monkeypatch.setitem(pjrt_client._PLATFORMS, kind, "cpu")
        monkeypatch.setitem(pjrt_client._NAMES, kind, "cpu")
        return hidden

    yield pass_for
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def on_tpu(accelerated, monkeypatch):
    """A machine with eight TPU devices; gives what TensorFlow must not see."""
    installed_version = environment.installed_version
    monkeypatch.setattr(environment, "installed_version",
                        lambda name: None if name == "tensorflow-tpu" else installed_version(name))
    monkeypatch.setattr(host, "has_tpu", lambda: True)
    return accelerated("TPU")


@pytest.fixture
def on_gpu(accelerated, monkeypatch):
    """A machine with eight GPUs and JAX's client for them; gives what TensorFlow must not see."""
    monkeypatch.setattr(environment, "cuda_plugin", lambda: "jax-cuda12-plugin")
    monkeypatch.setattr(host, "gpus", lambda: ["0"])
    return accelerated("GPU")


def test_a_tpu_is_trained_on_by_pjrt(on_tpu):
    partitioner = backends.create_partitioner(Layout("", DATA))
    assert type(partitioner) is PjrtPartitioner and partitioner.layout.mesh == {"data": 8}
    assert on_tpu == [([], "TPU")] and devices.device_type() == "TPU" and devices.are_jax()


def test_the_dtype_of_a_tpu_is_known_before_jax_starts(on_tpu):
    assert dtypes.dtype_policy() == "mixed_bfloat16" and not devices.are_jax()


def test_programs_of_a_tpu_are_cached(on_tpu, monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)
    partitioner = backends.create_partitioner(Layout("", DATA))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
    partitioner.keep_programs("gs://bucket/programs")
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/programs"
    partitioner.keep_programs("gs://bucket/x")  # the user's folder stays
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/programs"


def test_a_run_without_a_layout_takes_all_chips_and_records_the_layout(on_tpu, capsys, tmp_path):
    placed = experiments.place_here(_run())
    assert (placed.layout.mesh, placed.layout.is_one_program) == ({"data": 8}, True)
    assert capsys.readouterr().err == (
        "No layout is named, so 8 devices use gin/layouts/fully_sharded.gin, mesh data=8.\n")
    named = _run("gin/layouts/fully_sharded.gin").layout
    record = tmp_path / "operative_config.gin"
    record.write_text(placed.as_gin().text())
    assert Experiment.from_run(tmp_path).layout == named
    for name, num_devices in (("single", 1), ("auto", 8)):  # which replace the recorded one
        again = experiments.place_here(Experiment.from_gin([str(record), f"gin/layouts/{name}.gin"]))
        assert again.layout.num_devices == num_devices


def test_a_batch_that_the_chosen_layout_cannot_cut_is_refused(on_tpu):
    with pytest.raises(ValueError, match="BATCH_SIZE must be a multiple of 8 .1 microbatch times 8 devices., not 12"):
        experiments.place_here(Experiment.from_gin(RUN, [*BIND, "BATCH_SIZE=12"]))


def test_the_compilers_flags_are_set_before_a_tpu_starts(on_tpu, monkeypatch, capsys):
    monkeypatch.delitem(environment.OF_USER, "LIBTPU_INIT_ARGS")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " --jax")
    monkeypatch.setattr(pjrt_client, "_first_device", lambda kind: pytest.fail(os.environ["LIBTPU_INIT_ARGS"]))
    with pytest.raises(pytest.fail.Exception, match=r"^--jax --xla_jf_\S+=1000000 --xla_tpu_\S+=true$"):
        backends.create_partitioner(Layout("", DATA))
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("backend", ["one_device", "mirrored", "tpu"])
def test_back_ends_of_tensorflow_are_refused(on_tpu, backend):
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot use the TPU of this machine without "
                                         "tensorflow-tpu .* use --backend=pjrt"):
        backends.create_partitioner(Layout("", DATA, backend=backend))


@pytest.mark.parametrize(("version", "way"), [
    (None, "'pjrt', which 'auto' stands for here"), ("2.20.0", "'tpu'")])  # beside tensorflow-tpu, PJRT is refused
def test_dtensor_is_refused_on_a_tpu_before_anything_starts(on_tpu, monkeypatch, version, way):
    monkeypatch.setattr(environment, "installed_version", lambda name: version)
    with pytest.raises(ValueError) as raised:
        backends.create_partitioner(Layout("", DATA, backend="dtensor"))
    assert str(raised.value) == (
        "backend='dtensor' trains with DTensor here, which is for CPUs and GPUs, and this machine has a TPU; use "
        f"backend={way}.")
    assert not on_tpu and not devices.are_jax()


def test_one_device_of_several_processes_would_be_dtensors_which_is_refused_on_a_tpu(on_tpu, monkeypatch):
    monkeypatch.setattr(environment, "installed_version", lambda name: "2.20.0")
    variables = {}
    cluster.put(variables, ["a:1", "b:1"], 0)
    monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
    with pytest.raises(ValueError, match="backend='one_device' trains with DTensor here, which is for CPUs and GPUs"):
        backends.create_partitioner(Layout("", DATA, backend="one_device"))


@pytest.mark.parametrize("backend", ["auto", "pjrt"])
@pytest.mark.parametrize("layout", [Layout(), Layout("", DATA)])
def test_beside_tensorflow_tpu_the_default_is_refused(on_tpu, monkeypatch, layout, backend):
    monkeypatch.setattr(environment, "installed_version", lambda name: "2.20.0")
    with pytest.raises(ValueError, match="needs the libtpu that goes with JAX, and tensorflow-tpu another one; .* or "
                                         "use backend='tpu'"):
        backends.create_partitioner(dataclasses.replace(layout, backend=backend))


def test_commands_of_one_device_run_on_the_host(on_tpu, capsys, monkeypatch):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    devices.use_host("infer")
    assert type(backends.create_partitioner(Layout())) is Partitioner and devices.device_type() == "CPU"
    assert capsys.readouterr().err.startswith("`switch-tf infer` runs on the CPU of this TPU VM")


def test_gpus_and_cpus_keep_their_defaults(on_tpu, monkeypatch):
    monkeypatch.setattr(host, "has_tpu", lambda: False)
    assert type(backends.create_partitioner(Layout())) is Partitioner
    monkeypatch.setattr(dtensor, "create", lambda layout, members: "dtensor")
    assert backends.create_partitioner(Layout("data=8", DATA)) == "dtensor"


def test_gpus_are_trained_on_by_pjrt(on_gpu):
    partitioner = backends.create_partitioner(Layout("", DATA))
    assert type(partitioner) is PjrtPartitioner and partitioner.layout.mesh == {"data": 8}
    assert on_gpu == [([], "GPU")] and devices.are_jax() and dtypes.dtype_policy() == "mixed_bfloat16"


def test_a_run_without_a_layout_takes_all_gpus_and_no_virtual_cpus(on_gpu, monkeypatch):
    described = _run()
    assert experiments.place_here(described).layout.mesh == {"data": 8}
    monkeypatch.setattr(environment, "cuda_plugin", lambda: None)
    monkeypatch.setattr(devices, "_chosen", None)
    assert experiments.place_here(described).layout.num_devices == 1


@pytest.mark.parametrize("changed", [(host, "gpus", list), (environment, "cuda_plugin", lambda: None)],
                         ids=["no gpu", "no client"])
def test_without_a_gpu_or_jaxs_client_for_it_the_default_is_tensorflow(on_gpu, changed, monkeypatch):
    monkeypatch.setattr(*changed)
    assert type(backends.create_partitioner(Layout())) is Partitioner and not devices.are_jax()


def test_another_back_end_can_be_named_on_a_gpu(on_gpu):
    assert type(backends.create_partitioner(Layout(backend="one_device"))) is StrategyPartitioner
    assert not devices.are_jax()
