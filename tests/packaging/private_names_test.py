"""The private names of other libraries that the package uses, where they are, and the versions they were read in.

A name that is missing here is new: use a public one, or add it. A test that fails after an upgrade says which code to
read again.
"""

import ast
import importlib
import inspect
import pathlib
from importlib import metadata

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "switch_tf"
READ_IN = {"seqio": "0.0.20", "keras": "3.15.1", "tensorflow": "2.21.0", "jax": "0.10.2", "argparse": None}  # Python's
_SOURCE, _TASK, _MIXTURE = (f"seqio.dataset_providers:{name}" for name in ("FileDataSource", "Task", "Mixture"))
# Name -> the module or class whose code has it.
NAMES = {
    "_block_length": _SOURCE, "_cycle_length": _SOURCE, "_reader": _SOURCE, "_split_to_filepattern": _SOURCE,
    "_cache_step_idx": _TASK, "_metric_objs_constructor_args": _TASK, "_shuffle_buffer_size": _TASK,
    "_sample_fn": _MIXTURE, "_task_map": _MIXTURE,
    "_all_reduce_sum_gradients": "keras.src.backend.tensorflow.optimizer:TFOptimizer",
    "_flatten_layers": "keras:Layer", "_get_variable_index": "keras.src.optimizers.base_optimizer:BaseOptimizer",
    "_learning_rate": "keras.src.optimizers.base_optimizer:BaseOptimizer",
    "global_seed_generator": "keras.src.random.seed_generator",
    "_dense_var_to_tensor": "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable",
    "_serialize_to_tensors": "tensorflow.python.trackable.base:Trackable",
    "context": "tensorflow.python.eager.context",
    "GraphOrParentsInXlaContext": "tensorflow.python.ops.control_flow_util",
    "global_state": "jax._src.distributed",
    "_option_string_actions": "argparse:ArgumentParser",
}
_PRIVATE_PARTS = {"_src", "src", "python"}  # of jax, Keras and TensorFlow
_PUBLIC = {"_asdict", "_replace", "_exit", "array_record.python"}  # of named tuples, os and ArrayRecord
# The package has attributes or methods of the same names.
_AMBIGUOUS = {"_reader", "_serialize_to_tensors", "_dense_var_to_tensor"}


def _used():
    """Returns private attributes that the package does not define, and private modules that it imports."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {str(node.args[1].value) for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1
              and ast.unparse(node.func) in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant)}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module
               and _PRIVATE_PARTS & set(node.module.split("."))}
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    return private - own - _PUBLIC, modules - _PUBLIC


def test_every_private_name_is_listed():
    names, modules = _used()
    assert names | _AMBIGUOUS == {name for name in NAMES if name.startswith("_")}
    assert modules == {where.partition(":")[0].rpartition(".")[0] for name, where in NAMES.items()
                       if not name.startswith("_")}


@pytest.mark.parametrize("library", READ_IN)
def test_the_version_is_the_one_that_was_read(library):
    version = READ_IN[library]
    if version is not None:
        assert metadata.version(library) == version, f"read the code of {library} that NAMES lists again"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_where_it_was(name):
    module, _, attribute = NAMES[name].partition(":")
    place = importlib.import_module(module)
    if attribute:
        place = getattr(place, attribute)
    assert hasattr(place, name) or f"self.{name}" in inspect.getsource(place)
