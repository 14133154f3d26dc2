"""The seqio tasks of the tests of training and of stored predictions; a teacher and its student."""

import dataclasses

import keras
import pytest
import seqio
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.conversion import own
from tests.training.conftest import SENTENCES, sentences_task

__all__ = ["sentences_task"]


@seqio.map_over_dataset(num_seeds=1)
def _change_letters(example, seed):
    """Replaces a tenth of the inputs, others in each pass over the data."""
    is_changed = tf.random.stateless_uniform(tf.shape(example["inputs"]), seed) < 0.1
    return {**example, "inputs": tf.where(is_changed, 9, example["inputs"])}


@pytest.fixture(scope="session")
def noisy_task():
    """A task with noise, which can be cached."""
    name = "noisy_sentences"
    if name not in seqio.TaskRegistry.names():
        def read(split, shuffle_files, seed=None):
            return tf.data.Dataset.from_tensor_slices({"inputs": [s[:-12] for s in SENTENCES],
                                                       "targets": [s[-12:] for s in SENTENCES]})

        feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
        steps = [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), _change_letters,
                 seqio.preprocessors.append_eos]
        seqio.TaskRegistry.add(name, source=seqio.FunctionDataSource(read, splits=("train",)), preprocessors=steps,
                               output_features={"inputs": feature, "targets": feature}, shuffle_buffer_size=16)
    return name


@pytest.fixture(scope="module")
def teacher(shallow_config, tmp_path_factory):
    """The checkpoint of a sparse model with two experts that share the tokens unevenly."""
    keras.utils.set_random_seed(5)
    model = SwitchTransformer(dataclasses.replace(shallow_config, init_scale=1.0))
    model.build()
    folder = tmp_path_factory.mktemp("teacher") / "weights"
    own.to_switch_tf(model, folder)
    return folder


@pytest.fixture(scope="module")
def student_config(shallow_config):
    return dataclasses.replace(shallow_config, num_experts=0, d_ff=24, init_scale=1.0)
