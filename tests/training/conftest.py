"""A seqio task of a few sentences, and signals as they are at a terminal."""

import signal

import pytest
import seqio
import tensorflow as tf

SENTENCES = [f"the {animal} {verb} over the {place} and {more}" for animal in ("cat", "dog", "fox", "hen")
             for verb in ("runs", "leaps", "looks") for place in ("hill", "wall", "pond")
             for more in ("sleeps", "sings", "waits for rain")]


@pytest.fixture(autouse=True)
def _hears_sighup():
    """Tests that nohup runs ignore SIGHUP, and so would their children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def sentences_task():
    """A task whose inputs are the first and targets the last bytes of a sentence."""
    name = "sentences"
    if name not in seqio.TaskRegistry.names():
        def read(split, shuffle_files, seed=None):
            part = SENTENCES[::6] if split == "validation" else [s for i, s in enumerate(SENTENCES) if i % 6]
            return tf.data.Dataset.from_tensor_slices({"inputs": [s[:-12] for s in part],
                                                       "targets": [s[-12:] for s in part]})

        feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
        seqio.TaskRegistry.add(name, source=seqio.FunctionDataSource(read, splits=("train", "validation")),
                               preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
                               output_features={"inputs": feature, "targets": feature})
    return name
