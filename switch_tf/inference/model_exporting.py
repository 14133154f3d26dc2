"""Exports a SwitchTransformer of Keras as a SavedModel with decoding."""

import pathlib
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from switch_tf import __version__, checks, data, decoding
from switch_tf.inference import exporting
from switch_tf.inference.text_model import TextModel, fitting_vocabulary
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places

if TYPE_CHECKING:
    from switch_tf.decoding import Sampler


def load(file: str | pathlib.Path) -> keras.Model:
    """Loads a SwitchTransformer that Keras saved.

    Raises:
        Refusal: Keras cannot read the file, or it holds another model.
    """
    try:
        with places.fetched(file) as local:
            model = keras.models.load_model(local, compile=False)
    except (ValueError, OSError) as error:  # as Keras raises them for files that are not its own
        raise Refusal(f"{file} cannot be loaded: {first_line(error)}") from error
    if not isinstance(model, SwitchTransformer):
        raise Refusal(f"{file} holds a {type(model).__name__}, not a SwitchTransformer; Keras' own "
                      "model.export(folder) exports it.")
    return model


def export(model: keras.Model, folder: str | pathlib.Path, vocabulary: Any = None, max_length: int = 64,
           sampler: "str | Sampler" = "greedy", inputs_length: int = 512, about: dict[str, Any] | None = None) -> None:
    """Writes a SavedModel with decoding and a `MODEL_CARD.md`. `model.export` writes the forward pass alone.

    With a vocabulary it has the signatures of `switch-tf export`: `serving_default` from texts to texts, and `ids`.
    Without one both names have the signature of ids: `inputs`, <int32>[batch, length], padding 0, to `outputs`,
    <int32>[batch, max_length], and `scores`, <float32>[batch]. Batch and length may be any size. The folder appears
    complete or not at all.

    Args:
        model: SwitchTransformer with a decoder.
        folder: Path of a folder that does not exist yet, or is empty.
        vocabulary: Name of a registered vocabulary, path of a SentencePiece model, a seqio vocabulary, or None.
        max_length: int. Largest number of tokens to decode, the end of sequence included.
        sampler: See `SwitchTransformer.generate`. Of a beam, only the best result is returned.
        inputs_length: int. Largest number of tokens of a text; the rest is cut. Ids are never cut.
        about: dict, JSON-able. Origin of the model, for the card.

    Raises:
        Refusal: the folder is not empty or cannot be written, the model has no decoder, or the vocabulary does not fit.
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
    """The program from ids to ids, with its weights."""

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
