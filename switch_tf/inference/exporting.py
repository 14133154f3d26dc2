"""Exports a model and its vocabularies as a SavedModel from texts to texts, for TensorFlow alone."""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING

import tensorflow as tf

from switch_tf import __version__, checks, data
from switch_tf.inference.text_model import TextModel
from switch_tf.refusals import Refusal, first_line
from switch_tf.storage.resumable_folder import resumable_folder
from switch_tf.storage.whole_file import writing

if TYPE_CHECKING:
    from switch_tf.decoding import Sampler

CARD = "MODEL_CARD.md"


def export(text_model: TextModel, folder: str | pathlib.Path, about: dict) -> None:
    """Writes a SavedModel for TensorFlow with tensorflow-text, and a `MODEL_CARD.md`.

    Its signatures take any number of rows and return the best result of each. An empty text has an empty output and
    score 0. The folder appears complete or not at all.

    * `serving_default`: `inputs`, <string>[batch], to `outputs`, <string>[batch], and `scores`, <float32>[batch].
    * `ids`: `inputs`, <int32>[batch, length], padding 0, to `outputs`, <int32>[batch, max_length], and `scores`.

    Args:
        text_model: TextModel. Its batch size is not used.
        folder: Path of a folder that does not exist yet, or is empty.
        about: dict, JSON-able. Origin of the model, for the card.

    Raises:
        Refusal: the folder is not empty or cannot be written, or the vocabulary cannot be written into a program.
    """
    folder = checks.path("folder", folder).resolve()
    checks.new_folder(folder)
    module = _Served(text_model)
    save(module, {"serving_default": module.answer, "ids": module.decode}, _card(text_model, folder, about), folder)


def save(module: tf.Module, signatures: dict, card: str, folder: pathlib.Path) -> None:
    """Writes programs and `MODEL_CARD.md`. The folder appears complete or not at all.

    Args:
        module: tf.Module with the programs and their weights.
        signatures: dict, name -> `tf.function` of the module.
        card: str. Text of `MODEL_CARD.md`.
        folder: Path of a folder that does not exist yet, or is empty.

    Raises:
        Refusal: the disk is full or not writable.
    """
    try:
        with resumable_folder(folder, "saved_model.pb") as work, writing(folder):
            tf.saved_model.save(module, str(work.folder), signatures=signatures)
            (work.folder / CARD).write_text(card)
    except tf.errors.OpError as error:
        raise Refusal(f"{folder} could not be written ({first_line(error)}).") from error


class _Served(tf.Module):
    """The programs with their weights and vocabularies."""

    def __init__(self, text_model):
        super().__init__()
        self._text_model = text_model
        self._weights = [variable.value for variable in text_model.model.variables]
        reading = text_model.features
        self._inputs = data.SpellingOps(reading.inputs, reading.sentinels, reading.prefix, reading.keeps_end)
        same = reading.targets is reading.inputs
        self._targets = self._inputs if same else data.SpellingOps(reading.targets)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "inputs")], autograph=False)
    def answer(self, inputs):
        ids, scores = self._best(self.read(inputs))
        return {"outputs": self._targets.spell(ids), "scores": scores}

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, "inputs")], autograph=False)
    def decode(self, inputs):
        ids, scores = self._best(inputs)
        return {"outputs": ids, "scores": scores}

    def read(self, inputs):
        """Returns the ids of texts as `TextModel.read`: <string>[batch] -> <int32>[batch, longest]."""
        return self._inputs.read(inputs, self._text_model.inputs_length, self._text_model.features.inputs_end)

    def _best(self, inputs):
        model = self._text_model
        decoded = model.sampler.decode(model.model, {"encoder_input_tokens": inputs}, model.max_length,
                                       model.features.targets.eos_id)
        return decoded.ids[:, 0], decoded.scores[:, 0]


def in_words(sampler: "Sampler") -> str:
    """Describes a sampler: "greedy search", "beam search (num_beams 4, length_penalty 0.6, num_results 1)"."""
    kind = {"Greedy": "greedy search", "Beam": "beam search", "Sample": "sampling"}[type(sampler).__name__]
    settings = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(sampler).items())
    return f"{kind} ({settings})" if settings else kind


def _card(text_model, folder, about):
    model, sampler = text_model.model, text_model.sampler
    reading = text_model.features
    return _CARD.format(
        reading=_READINGS[reading.sentinels] + (f" {reading.prefix!r} is put before a text." if reading.prefix else ""),
        name=folder.name, parameters=f"{model.config.num_parameters:,}", sampler=in_words(sampler),
        about=json.dumps(about, indent=1), inputs_length=text_model.inputs_length, dtype=model.dtype_policy.name,
        max_length=text_model.max_length, vocab_size=model.config.vocab_size,
        config=json.dumps(dataclasses.asdict(model.config), indent=1),
        versions=f"switch_tf {__version__}, TensorFlow {tf.__version__}")


_READINGS = {
    "gaps": "`<extra_id_0>` is a gap where the vocabulary has sentinels.",
    "spelt_out": "`<extra_id_0>` is text, as in training.",
    "as_tokenized": "`<extra_id_0>` is what the vocabulary makes of it, as in training.",
}
_CARD = """# {name}

A Switch Transformer of {parameters} parameters, computing in {dtype}, written by {versions}.
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
