"""Shared by these tests: golden checkpoints of Hugging Face in every form, their logits, and what a refusal says."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from switch_tf import SwitchTransformer, conversion
from switch_tf.conversion import checkpoint_files, t5x, weight_source
from switch_tf.refusals import Refusal
from tests.conversion import mesh_tensorflow_checkpoints, t5x_checkpoints

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hugging_face"
# Layers in a block of Mesh TensorFlow: experts are second in it as in Switch Transformers, or in every layer.
BLOCKS = {"t5_1_0": 1, "t5_1_1": 1, "switch": 2, "switch_step_1": 1}


def refusal(function, *arguments, **options):
    """Returns the sentence with which a function refuses its arguments."""
    with pytest.raises(Refusal) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def built(config, **options):
    """Returns a model with weights."""
    model = SwitchTransformer(config, **options)
    model.build()
    return model


def tensors_of(case):
    """Returns the tensors of a golden checkpoint, name -> values."""
    return {name: tensor.read() for name, tensor in checkpoint_files.open_folder(GOLDEN / case).items()}


def copy(case, folder, tensors=None, **values):
    """Copies a golden checkpoint, with other values in config.json or other tensors; returns the folder."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    if tensors is None:
        shutil.copy(GOLDEN / case / "model.safetensors", folder)
    else:
        safetensors.numpy.save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
                                    folder / "model.safetensors")
    return folder


@functools.cache
def _golden(case):
    config = conversion.from_hugging_face(GOLDEN / case).config
    return config, t5x_checkpoints.arrays_from(tensors_of(case), config.num_encoder_layers, config.num_decoder_layers,
                                               config.logits_via_embedding)


def golden(case):
    """Returns the configuration of a golden checkpoint and its arrays in T5X's form."""
    config, arrays = _golden(case)
    return config, {name: values.copy() for name, values in arrays.items()}


def golden_variables(case, **options):
    """Returns the configuration of a golden checkpoint and its variables in Mesh TensorFlow's form."""
    config, arrays = golden(case)
    return config, mesh_tensorflow_checkpoints.variables_from(arrays, BLOCKS[case], **options)


def arrays_of(model):
    """Returns the weights of a model as T5X's arrays."""
    weights = weight_source.variables_of(model)
    return {name.removeprefix("target/"): values for link in t5x.RULES.link(weight_source.weights_of(model.config))
            for name, values in link.to_theirs(np.asarray(weights[link.ours]))}


def expected_logits(case):
    """Returns features of a golden checkpoint, PyTorch's logits for them, and which of these are real."""
    expected = np.load(GOLDEN / case / "expected.npz")
    features = {"encoder_input_tokens": expected["inputs"], "decoder_input_tokens": expected["decoder_inputs"]}
    return features, expected["logits"], expected["targets"] != 0


def assert_same_logits(model, case, tolerance=1e-4):
    """Compares logits with PyTorch's."""
    features, logits, is_real = expected_logits(case)
    assert np.abs(model(features) - logits)[is_real].max() < tolerance


def assert_same_values(found, expected):
    """Compares name -> values, bit for bit."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name].view(np.uint8), values.view(np.uint8), err_msg=name)


def values_of(model):
    """Returns the values of a model's weights by their names within it."""
    return {name: variable.numpy() for name, variable in weight_source.variables_of(model).items()}


def our_name(name):
    """Returns this package's name of T5X's array."""
    if name.endswith(("router_weights/w/kernel", "logits_dense/kernel")):
        return name.replace("router_weights/w/", "").replace("decoder/logits_dense", "logits_dense")
    return name.removesuffix("/kernel").replace("mlp/expert/", "mlp/experts/")


def assert_weights_are(model, arrays):
    """Compares a model's weights with T5X's arrays, bit for bit."""
    weights = values_of(model)
    assert_same_values(weights, {our_name(name): np.ascontiguousarray(values).reshape(weights[our_name(name)].shape)
                                 for name, values in arrays.items()})
