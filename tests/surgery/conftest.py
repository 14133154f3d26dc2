"""The seqio tasks of the tests of training and of stored predictions; a teacher and its student."""

import dataclasses

import keras
import pytest
import seqio
import tensorflow as tf

from switch_tf import SwitchTransformer
from switch_tf.cli import main
from switch_tf.conversion import own
from switch_tf.reporting import report
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
    folder = tmp_path_factory.mktemp("teacher") / "weights"
    own.to_switch_tf(SwitchTransformer(dataclasses.replace(shallow_config, init_scale=1.0)), folder)
    return folder


@pytest.fixture(scope="module")
def student_config(shallow_config):
    return dataclasses.replace(shallow_config, num_experts=0, d_ff=24, init_scale=1.0)


@pytest.fixture
def train(sentences_task, tmp_path, monkeypatch, capfd):
    """A function that trains with gin files and bindings in a folder; returns the status and what was said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "write", lambda folder: None)
    (tmp_path / "sentences.gin").write_text(
        'MIXTURE_OR_TASK_NAME = "sentences"\nTASK_FEATURE_LENGTHS = {"inputs": 32, "targets": 16}\n')

    def train(*files_and_bindings):
        words = ("sentences.gin", "LOG_PERIOD=1", "CHECKPOINT_PERIOD=2", "Run.eval_batches=1", *files_and_bindings)
        files = [f"--gin_file={word}" for word in words if word.endswith(".gin")]
        status = main.main(["train", *files, *(f"--gin.{word}" for word in words if not word.endswith(".gin"))])
        return status, capfd.readouterr().err

    return train
