"""What all tests share: a tiny model, a batch by hand, layouts; and the order and the cost of the tests themselves.

Every test process has eight virtual CPU devices, which nothing but the tests of layouts uses, and TensorFlow's graph
optimiser is off, because it takes longer than what it saves; one test of training/train_step_test.py has it on, and so
have the processes that tests start. For the same reason few sequences are decoded without XLA, but for tests that ask
for `fusing`, and operations of graphs do not record where in Python they were made.
"""

import collections
import contextlib
import csv
import dataclasses
import functools
import gc
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import typing
import urllib.parse
import urllib.request
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("LIBTPU_INIT_ARGS", "")  # the compiler's own defaults

import gin
import numpy as np
import pytest

from switch_tf import SwitchConfig
from switch_tf.configs import gin_syntax, parts

ROOT = pathlib.Path(__file__).parents[1]
NUM_DEVICES = 8

# The files and folders that take longest start first, so that no worker is left with one at the end.
HEAVY = ("parity/layouts_test.py", "training/", "checkpoints/", "evaluation/", "reliability/", "models/", "decoding/",
         "parity/", "cli/compile_test.py", "aot/", "data/", "cli/verify_layout_test.py", "partitioning/", "layers/")
# Heads times d_kv is not d_model, and no two sizes are alike.
SMALL = {
    "vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 3, "num_encoder_layers": 2,
    "num_decoder_layers": 2, "dropout_rate": 0.0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12}
SPARSE = {**SMALL, "num_experts": 4, "min_expert_capacity": 1, "jitter_noise": 0.0}
_cpu_before = 0.0


def pytest_configure(config):
    """Devices and graph optimiser of a process that tests; one that hands them out to others needs no TensorFlow."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; tests interrupt their children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "accelerator" not in config.option.markexpr.replace("not accelerator", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests run on the CPU on any machine
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    import jax
    import tensorflow as tf

    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # LLVM's take longer than they save here
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    from tensorflow.python.framework import ops

    ops._create_c_op = functools.partial(ops._create_c_op, extract_traceback=False)  # a tenth of the time of tracing
    if sys.version_info < (3, 12):  # later ones keep a protocol's methods, which TensorFlow asks for with each tensor
        typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)


def pytest_collection_modifyitems(items):
    """Heavy files first."""
    items.sort(key=lambda item: next(
        (place for place, name in enumerate(HEAVY) if item.location[0].startswith(f"tests/{name}")), len(HEAVY)))


def pytest_collection_finish():
    """Garbage is looked for less often, and not among what was imported: a tenth of the time went into it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Notes the CPU seconds, of this process and of those that it has waited for, since the report before."""
    global _cpu_before
    report = yield
    now = sum(os.times()[:4])
    report.cpu_seconds, _cpu_before = now - _cpu_before, now
    return report


def pytest_runtest_logstart():
    global _cpu_before
    _cpu_before = sum(os.times()[:4])


def pytest_terminal_summary(terminalreporter):
    """The ten tests that cost most, with what their fixtures cost where they were the first to need them."""
    seconds = collections.Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if hasattr(report, "cpu_seconds"):
            seconds[report.nodeid] += report.cpu_seconds
    if not seconds:
        return
    terminalreporter.section(f"{seconds.total():.0f} CPU seconds in all; the most of them in")
    for name, spent in seconds.most_common(10):
        terminalreporter.line(f"{spent:6.1f}  {name}")


def set_weights(model):
    """Gives every weight random values that depend on its path alone: two models of one structure are the same."""
    for variable in model.variables:
        path = variable.path.partition("/")[2]
        rng = np.random.RandomState(zlib.crc32(path.encode()))
        noise = rng.randn(*variable.shape)
        if path.endswith("scale"):
            variable.assign(1 + 0.2 * noise)
        elif path.endswith("embedding"):
            variable.assign(noise)
        else:
            # The sum runs over d_model, d_ff, or heads and d_kv; queries are smaller by sqrt(d_kv).
            is_query = path.endswith("/query")
            is_projection = is_query or path.endswith(("/key", "/value"))
            fan_in = variable.shape[0] if is_projection else np.prod(variable.shape[:-1][-2:])
            variable.assign(noise / (fan_in * (variable.shape[-1] if is_query else 1)) ** 0.5)


@functools.cache
def cached_model(dtype, items):
    from switch_tf import SwitchTransformer

    model = SwitchTransformer(SwitchConfig(**dict(items)), dtype=dtype)
    model.build()
    set_weights(model)
    return model


@pytest.fixture(autouse=True, scope="session")
def nothing_is_left_behind():
    """Tests write into folders of their own: what a made-up value names must not appear beside the sources."""
    before = set(os.listdir(ROOT))
    yield
    left = {name for name in os.listdir(ROOT) if not (name.startswith(".") or name == "__pycache__")} - before
    assert not left, f"The tests left {sorted(left)} in {ROOT}."


@pytest.fixture(autouse=True)
def nothing_is_left_set():
    """Restores what a command sets in gin and csv for the whole process."""
    limit = csv.field_size_limit()
    yield
    csv.field_size_limit(limit)
    gin.clear_config()


@pytest.fixture(autouse=True, scope="session")
def not_fusing():
    """Turns XLA's programs off; returns the function that turned them on."""
    from switch_tf.ops import forms

    can_fuse, forms._can_fuse = forms._can_fuse, lambda arguments: False
    return can_fuse


@pytest.fixture
def fusing(monkeypatch, not_fusing):
    """XLA's programs, as users have them."""
    from switch_tf.ops import forms

    monkeypatch.setattr(forms, "_can_fuse", not_fusing)


class Bucket:
    """The fake object store of this process, `bucket/server.py`, and what its processes need to know.

    Attributes:
        environ: Environment variables for TensorFlow's client.
    """

    def __init__(self, environ):
        self.environ, self._count = environ, 0

    def new_folder(self):
        """Returns the URL of a folder that nobody else has."""
        self._count += 1
        return f"gs://bucket/{self._count}"

    def control(self, **settings):
        """Sets "fail" and "latency" of the server; returns its state."""
        url = f"{self.environ['https_proxy']}/_control?{urllib.parse.urlencode(settings)}"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def _bucket(tmp_path_factory):
    command = [sys.executable, ROOT / "tests" / "bucket" / "server.py", tmp_path_factory.mktemp("bucket")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environ = json.loads(server.stdout.readline())
    of_tests = environ | {"GCS_STAT_CACHE_MAX_AGE": "0"}  # a process that tests sees what others write at once
    before = {name: os.environ.get(name) for name in of_tests}
    os.environ.update(of_tests)  # TensorFlow's client reads them once
    yield Bucket(environ)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    server.communicate("")


@pytest.fixture
def bucket(_bucket):
    """A Bucket that answers at once and never fails."""
    yield _bucket
    _bucket.control(fail=0, fail_reads=0, latency=0, deny=0)


@pytest.fixture(scope="session")
def make_model():
    """A function that makes a small model with known weights, sparse unless told otherwise; tests share models, and
    must not change them."""

    def make(dtype="float32", is_sparse=True, **overrides):
        return cached_model(dtype, tuple({**(SPARSE if is_sparse else SMALL), **overrides}.items()))

    return make


@pytest.fixture(scope="session")
def fresh_model():
    """The same without sharing, for tests that change the model."""

    def make(dtype="float32", is_sparse=True, **overrides):
        return cached_model.__wrapped__(dtype, tuple({**(SPARSE if is_sparse else SMALL), **overrides}.items()))

    return make


@pytest.fixture(scope="session")
def tiny_config():
    return SwitchConfig(vocab_size=384, d_model=16, d_ff=32, d_kv=8, num_heads=2, num_encoder_layers=2,
                        num_decoder_layers=2, num_experts=4, num_groups_multiple=4, min_expert_capacity=1,
                        dropout_rate=0.1, expert_dropout_rate=0.1, init_scale=0.1)


@pytest.fixture(scope="session")
def shallow_config(tiny_config):
    """One layer a stack, sparse: for tests that trace steps, which takes as long as the model is deep."""
    return dataclasses.replace(tiny_config, num_encoder_layers=1, num_decoder_layers=1, encoder_sparse_step=1,
                               decoder_sparse_step=1)


@pytest.fixture(scope="session")
def shipped_layout():
    """A function from the name of a file of gin/layouts to its Layout, complete for the devices of the tests."""
    def read(name, mesh_shape=None, **changes):
        bindings = [f"MESH_SHAPE='{mesh_shape}'"] if mesh_shape is not None else []
        part = gin_syntax.read([f"gin/layouts/{name}.gin"], bindings).check().part(parts.LAYOUT)
        layout = dataclasses.replace(part, arguments=part.arguments | changes).make()
        return layout.resolve(NUM_DEVICES if layout.open_axes else layout.num_devices, "CPU")

    return read


@pytest.fixture(scope="session")
def make_partitioner(shipped_layout):
    """A function from the name of a layout to its partitioner, on as many of the tests' devices as its mesh has."""

    def make(name, mesh_shape=None, **changes):
        import tensorflow as tf
        from tensorflow.experimental import dtensor

        from switch_tf.partitioning import cluster
        from switch_tf.partitioning.backends import pjrt_client
        from switch_tf.partitioning.backends.dtensor import DTensorPartitioner
        from switch_tf.partitioning.backends.pjrt import PjrtPartitioner
        from switch_tf.partitioning.backends.strategies import StrategyPartitioner
        from switch_tf.partitioning.partitioner import Partitioner

        layout = shipped_layout(name, mesh_shape, **changes)
        names = [f"CPU:{index}" for index in range(layout.num_devices)]
        if layout.backend == "pjrt":
            pjrt_client.start(cluster.members())
            return PjrtPartitioner(layout)
        if layout.num_devices == 1:
            return Partitioner(layout)
        if layout.backend == "mirrored":
            # Collectives have room for one group of devices in a process, and a test process has several.
            reduction = tf.distribute.ReductionToOneDevice()
            return StrategyPartitioner(layout, tf.distribute.MirroredStrategy(names, cross_device_ops=reduction))
        return DTensorPartitioner(layout, dtensor.create_mesh(list(layout.mesh.items()), devices=names))

    return make


@pytest.fixture(scope="session")
def batch():
    """8 examples of 12 input and 6 target tokens, some of them shorter."""
    import tensorflow as tf

    random = np.random.RandomState(0)
    inputs, targets = random.randint(3, 384, (8, 12)), random.randint(3, 384, (8, 6))
    inputs[2:5, 7:] = 0
    targets[4:, 4:] = 0
    features = {"encoder_input_tokens": inputs, "decoder_target_tokens": targets,
                "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
                "decoder_loss_weights": targets > 0}
    return {name: tf.constant(value, tf.int32) for name, value in features.items()}


@pytest.fixture
def metadata_server():
    """A function that starts a metadata server of a TPU VM; returns its address and the paths that it is asked for.

    An attribute, or a state of the VM, is text, a function that returns it, or the status of an answer without text.
    Other attributes are not there.
    """
    with contextlib.ExitStack() as started:
        yield lambda **attributes: started.enter_context(_serving(attributes))


@contextlib.contextmanager
def _serving(attributes):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            asked.append(self.path)
            folder, _, name = self.path.rpartition("/")
            found = attributes.get(name.replace("-", "_"), 404)
            found = found() if callable(found) else found
            self.send_response(found if isinstance(found, int) else 200)
            self.end_headers()
            is_state = name in ("maintenance-event", "preempted")
            if folder == "/computeMetadata/v1/instance" + "/attributes" * (not is_state) and isinstance(found, str):
                self.wfile.write(found.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()
