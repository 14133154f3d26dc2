"""A Keras model, trained by `fit`, loaded or converted, as a SavedModel that decodes."""

import keras
import tensorflow as tf

from switch_tf import __version__, checks, data, decoding
from switch_tf.inference import exporting
from switch_tf.inference.text_model import TextModel, fitting_vocabulary
from switch_tf.messages import first_line
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal


def load(file) -> keras.Model:
    """Loads a SwitchTransformer that Keras saved.

    Raises:
        Refusal: Keras cannot read the file, or it holds another model.
    """
    try:
        model = keras.models.load_model(file, compile=False)
    except (ValueError, OSError) as error:  # as Keras raises them for files that are not its own
        raise Refusal(f"{file} cannot be loaded: {first_line(error)}") from error
    if not isinstance(model, SwitchTransformer):
        raise Refusal(f"{file} holds a {type(model).__name__}, not a SwitchTransformer; Keras' own "
                      "model.export(folder) exports it.")
    return model


def export(model, folder, vocabulary=None, max_length=64, sampler="greedy", inputs_length=512, about=None) -> None:
    """Writes a SavedModel with decoding inside; `model.export` writes the forward pass alone.

    With a vocabulary it has the signatures of `switch-tf export`: `serving_default` from texts to texts, and `ids`.
    Without one both names have the signature of ids: `inputs`, <int32>[batch, length], padding 0, to `outputs`,
    <int32>[batch, max_length], and `scores`, <float32>[batch]. Batch and length are of any size. The folder appears
    complete or not at all, with a `MODEL_CARD.md`.

    Args:
        model: SwitchTransformer with a decoder.
        folder: path of a folder that does not exist yet, or is empty.
        vocabulary: name of a registered vocabulary, path of a SentencePiece model, a seqio vocabulary, or None.
        max_length: int, tokens to decode at most, the end of sequence included.
        sampler: see `SwitchTransformer.generate`; of a beam the best result is written.
        inputs_length: int, tokens of a text that are read; the rest is cut. Ids are read whole.
        about: dict, JSON-able, for the card: where the model comes from.

    Raises:
        Refusal: the folder holds something, the model has no decoder, or a vocabulary does not fit it.
        OSError: the disk is full or not writable.
    """
    folder = checks.path("folder", folder).resolve()
    checks.new_folder(folder)
    decoding.check_decodes(model.config)
    if not model.built:
        model.build()
    if vocabulary is None:
        _export_ids(model, folder, checks.integer("max_length", max_length, 1), decoding.get_sampler(sampler))
        return
    vocabulary = fitting_vocabulary(vocabulary, model)
    text_model = TextModel(model, data.Reading(vocabulary, vocabulary), inputs_length, max_length, sampler,
                           batch_size=1)
    exporting.export(text_model, folder, about or {})


def _export_ids(model, folder, max_length, sampler):
    module = _Decoder(model, max_length, sampler)
    card = _CARD.format(
        name=folder.name, parameters=f"{model.config.num_parameters:,}", dtype=model.dtype_policy.name,
        version=__version__, vocab_size=model.config.vocab_size, max_length=max_length,
        sampler=exporting.in_words(sampler))
    exporting.save(module, {"serving_default": module.decode, "ids": module.decode}, card, folder)


class _Decoder(tf.Module):
    """The program from ids to ids, and the weights that it reads."""

    def __init__(self, model, max_length, sampler):
        super().__init__()
        self._weights = [variable.value for variable in model.variables]
        self._decode = lambda inputs: sampler.decode(model, {"encoder_input_tokens": inputs}, max_length)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, "inputs")], autograph=False)
    def decode(self, inputs):
        decoded = self._decode(inputs)
        return {"outputs": decoded.ids[:, 0], "scores": decoded.scores[:, 0]}


_CARD = """# {name}

A Switch Transformer of {parameters} parameters, computing in {dtype}, written by switch_tf {version}.
Loading it takes TensorFlow and nothing else.

```python
import tensorflow as tf

model = tf.saved_model.load("{name}")
found = model.signatures["serving_default"](inputs=tf.constant([[71, 259, 1]]))
print(found["outputs"].numpy(), found["scores"].numpy())
```

The signatures `serving_default` and `ids` are one program:

* `inputs`: int32 [batch, length], below {vocab_size}, padding 0
* `outputs`: int32 [batch, {max_length}]
* `scores`: float32 [batch]

Outputs are decoded by {sampler}. A score is the log-likelihood of the output's tokens in nats (with a beam's length
penalty applied to it).
"""
