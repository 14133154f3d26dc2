"""Imports T5X, Flaxformer and Mesh TensorFlow from clones, for the programs here that run them.

No numeric code is changed. Both are older than the libraries of this environment: packages that they import and do not
need for a model are stand-ins, and the `__init__` files that import everything are skipped.
"""

import functools
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
from unittest import mock

# Clones in one folder, and the commits that the golden files were made with.
COMMITS = {"t5x": "google-research/t5x cc342d4", "flaxformer": "google/flaxformer 399ea3a",
           "mesh": "tensorflow/mesh da90793"}
_STAND_INS = ("airio", "aqt", "chex", "fiddle", "grain", "jestimator",
              "tensorflow_probability", "cloud_tpu_client", "google.cloud")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a mock for each module of `_STAND_INS`."""

    def find_spec(self, name, path=None, target=None):
        if any(name == package or name.startswith(f"{package}.") for package in _STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__, module.__file__ = spec, [], spec.name, spec.name
        return module

    def exec_module(self, module):
        pass


def _package(name, folder):
    """Enters a package without running its `__init__`."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def use(clones: pathlib.Path) -> None:
    """Makes the three packages importable from the clones in a folder."""
    for name in COMMITS:
        if not (clones / name).is_dir():
            sys.exit(f"{clones / name} is missing: the golden files are made with clones of "
                     f"{', '.join(COMMITS.values())} from github.com, in folders {', '.join(COMMITS)} of one folder "
                     "(REFERENCES).")
        sys.path.append(str(clones / name))
    sys.meta_path.insert(0, _StandIns())
    sys.modules["cached_property"] = functools  # an older package of what is there now
    _package("t5x", clones / "t5x" / "t5x")


def use_tensorflow_1() -> None:
    """Puts back what TensorFlow 2 has removed of the names that Mesh TensorFlow imports."""
    import tensorflow as tf
    import tensorflow.compat.v1 as tf1
    from tensorflow.python.framework import ops, tensor_conversion_registry

    tf1.estimator = tf.estimator = types.SimpleNamespace(
        CheckpointSaverListener=object, SessionRunHook=tf1.train.SessionRunHook,
        ModeKeys=types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer"))
    ops.register_tensor_conversion_function = tensor_conversion_registry.register_tensor_conversion_function
    for name in ("utils", "dataset", "t2t_vocabulary", "vocabulary"):
        sys.modules[f"mesh_tensorflow.transformer.{name}"] = types.ModuleType(name)
