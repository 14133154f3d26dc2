"""Exports a model with its decoding as a SavedModel."""

import dataclasses
import json
import pathlib
from typing import Any

import keras
import tensorflow as tf

from switch_tf import __version__, checks, data, decoding
from switch_tf.inference.text_model import TextModel, fitting_vocabulary
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage import places
from switch_tf.storage.resumable_folder import resumable_folder
from switch_tf.storage.whole_file import writing

CARD = "MODEL_CARD.md"


def load(file: str | pathlib.Path) -> keras.Model:
    """Loads a SwitchTransformer that Keras saved."""
    try:
        with places.fetched(file) as local:
            model = keras.models.load_model(local, compile=False)
    except (ValueError, OSError) as error:  # raised for files of other software
        raise Refusal(f"{file} cannot be loaded: {first_line(error)}") from error
    if not isinstance(model, SwitchTransformer):
        raise Refusal(f"{file} holds a {type(model).__name__}, not a SwitchTransformer; Keras' own "
                      "model.export(folder) exports it.")
    return model


def export(model: keras.Model, folder: str | pathlib.Path, vocabulary: Any = None, max_length: int = 64,
           sampler: "str | decoding.Sampler" = "greedy", inputs_length: int = 512,
           about: dict[str, Any] | None = None) -> None:
    """Writes a SavedModel with decoding and a `MODEL_CARD.md`. `model.export` writes only the forward pass.

    With a vocabulary it has the signatures of `export_texts`. Without one, `serving_default` and `ids` both map
    `inputs`, <int32>[batch, length], padding 0, to `outputs`, <int32>[batch, max_length], and `scores`,
    <float32>[batch]. Batch and length may be any size. The folder appears complete or not at all.

    Args:
        model: SwitchTransformer with a decoder.
        folder: New or empty folder.
        vocabulary: See `inference.generate`, or None.
        max_length: Largest number of tokens to decode, the end of sequence included.
        sampler: See `SwitchTransformer.generate`. A beam returns only its best result.
        inputs_length: Tokens after which a text is cut. Ids are never cut.
        about: JSON-able. Origin of the model, for the card.
    """
    decoding.check_decodes(model.config)
    if not model.built:
        model.build()
    if vocabulary is not None:
        vocabulary = fitting_vocabulary(vocabulary, model)
        export_texts(TextModel(model, data.Reading(vocabulary, vocabulary), inputs_length, max_length, sampler,
                               batch_size=1), folder, about or {})
        return
    max_length, sampler = checks.integer("max_length", max_length, 1), decoding.get_sampler(sampler)
    module = _Decoder(model, max_length, sampler)
    _write(folder, module, module.decode, model, sampler, _CARD_OF_IDS, max_length=max_length)


def export_texts(text_model: TextModel, folder: str | pathlib.Path, about: dict) -> None:
    """Writes a SavedModel for TensorFlow with tensorflow-text, see `export`.

    Its signatures take any number of rows and return each row's best result. An empty text has an empty output and
    score 0.

    * `serving_default`: `inputs`, <string>[batch], to `outputs`, <string>[batch], and `scores`, <float32>[batch].
    * `ids`: `inputs`, <int32>[batch, length], padding 0, to `outputs`, <int32>[batch, max_length], and `scores`.
    """
    module, model, reading = _Answerer(text_model), text_model.model, text_model.features
    _write(folder, module, module.answer, model, text_model.sampler, _CARD_OF_TEXTS,
           about=json.dumps(about, indent=1), inputs_length=text_model.inputs_length, max_length=text_model.max_length,
           reading=_READINGS[reading.sentinels] + f" {reading.prefix!r} is put before a text." * bool(reading.prefix),
           config=json.dumps(dataclasses.asdict(model.config), indent=1))


def _write(folder, module, serving_default, model, sampler, card, **facts):
    folder = checks.path("folder", folder).resolve()
    checks.new_folder(folder)
    kind = {"Greedy": "greedy search", "Beam": "beam search", "Sample": "sampling"}[type(sampler).__name__]
    settings = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(sampler).items())
    text = card.format(
        name=folder.name, parameters=f"{model.config.num_parameters:,}", dtype=model.dtype_policy.name,
        vocab_size=model.config.vocab_size, sampler=f"{kind} ({settings})" if settings else kind,
        software=f"switch_tf {__version__}", tensorflow=tf.__version__, **facts)
    with resumable_folder(folder, "saved_model.pb") as work, writing(folder):
        tf.saved_model.save(module, str(work.folder), signatures={
            "serving_default": serving_default, "ids": module.decode})
        (work.folder / CARD).write_text(text)


class _Decoder(tf.Module):
    def __init__(self, model, max_length, sampler, end_id=None):
        super().__init__()
        self._weights = [variable.value for variable in model.variables]
        self._decoded = lambda inputs: sampler.decode(model, {"encoder_input_tokens": inputs}, max_length, end_id)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, "inputs")], autograph=False)
    def decode(self, inputs):
        decoded = self._decoded(inputs)
        return {"outputs": decoded.ids[:, 0], "scores": decoded.scores[:, 0]}


class _Answerer(_Decoder):
    def __init__(self, text_model):
        reading = text_model.features
        super().__init__(text_model.model, text_model.max_length, text_model.sampler, reading.targets.eos_id)
        self._inputs = data.SpellingOps(reading.inputs, reading.sentinels, reading.prefix, reading.keeps_end)
        same = reading.targets is reading.inputs
        self._targets = self._inputs if same else data.SpellingOps(reading.targets)
        # As `TextModel.read`: <string>[batch] -> <int32>[batch, longest].
        self.read = lambda inputs: self._inputs.read(inputs, text_model.inputs_length, reading.inputs_end)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "inputs")], autograph=False)
    def answer(self, inputs):
        decoded = self._decoded(self.read(inputs))
        return {"outputs": self._targets.spell(decoded.ids[:, 0]), "scores": decoded.scores[:, 0]}


_READINGS = {
    "gaps": "`<extra_id_0>` is a gap where the vocabulary has sentinels.",
    "spelt_out": "`<extra_id_0>` is text, as in training.",
    "as_tokenized": "`<extra_id_0>` is what the vocabulary makes of it, as in training.",
}
_CARD_OF_TEXTS = """# {name}

A Switch Transformer of {parameters} parameters, computing in {dtype}, written by {software}, TensorFlow {tensorflow}.
Loading it takes TensorFlow and tensorflow-text, nothing else.

```python
import tensorflow as tf
import tensorflow_text  # brings the operations of SentencePiece

model = tf.saved_model.load("{name}")
answer = model.signatures["serving_default"]
found = answer(inputs=tf.constant(["Text with a <extra_id_0> in it."]))
print(found["outputs"].numpy(), found["scores"].numpy())
```

| signature | takes `inputs` | gives `outputs` | and `scores` |
|---|---|---|---|
| `serving_default` | string [batch] | string [batch] | float32 [batch] |
| `ids` | int32 [batch, length], below {vocab_size}, padding 0 | int32 [batch, {max_length}] | float32 [batch] |

A text is read up to {inputs_length} tokens and answered with {max_length} at most, by {sampler}.
A score is the log-likelihood of the output's tokens in nats (what the length penalty makes of it, of a beam).
{reading} A text with nothing in it has an empty output.

TensorFlow Serving takes the folder as `<models>/<any name>/<a number>/`:

```
POST /v1/models/<any name>:predict   {{"instances": ["Text with a <extra_id_0> in it."]}}
200                                  {{"predictions": [{{"outputs": "<extra_id_0> gap", "scores": -1.5}}]}}
```

## Where it comes from

```json
{about}
```

## Configuration

```json
{config}
```
"""
_CARD_OF_IDS = """# {name}

A Switch Transformer of {parameters} parameters, computing in {dtype}, written by {software}.
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
