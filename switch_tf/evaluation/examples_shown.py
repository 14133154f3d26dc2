"""Shows a few held-out examples with a model's predictions beside the targets."""

import re
import textwrap
from typing import NamedTuple

import keras
import numpy as np

from switch_tf import data
from switch_tf.configs.run import Run
from switch_tf.inference.programs import compile_prediction
from switch_tf.partitioning.partitioner import Partitioner

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_MOST_GAPS = 3  # in an example; the rest is left out
_MOST_WORDS = 60  # in inputs without gaps


class Shown(NamedTuple):
    """Texts of one example: `inputs`, `target`, and the greedy `prediction`."""

    inputs: str
    target: str
    prediction: str


def predict(model: keras.Model, run: Run, partitioner: Partitioner) -> list[Shown]:
    """Returns predictions for the first `run.shown_examples` examples of the validation split, at most a batch."""
    description = data.description_of_data(run, model.config, "validation", 0)
    examples = data.examples(description, min(run.shown_examples, run.batch_size))
    vocabulary = data.target_vocabulary(run.mixture_or_task_name, run.vocabulary)
    tokens = np.zeros((run.batch_size, run.task_feature_lengths["inputs"]), "int32")
    for row, example in zip(tokens, examples, strict=False):
        ids = example["inputs"]["ids"][:tokens.shape[1]]
        row[:len(ids)] = ids
    program = compile_prediction(model, run.task_feature_lengths["targets"], partitioner, vocabulary.eos_id)
    predictions = program({"encoder_input_tokens": tokens})
    return [Shown(example["inputs"]["text"], example["targets"]["text"],
                  data.spell(vocabulary, np.trim_zeros(ids, "b").tolist()))
            for example, ids in zip(examples, predictions, strict=False)]


def describe(shown: list[Shown]) -> str:
    """Returns paragraphs to print: gaps as [prediction | target], or inputs, prediction and target in turn."""
    paragraphs = ["Held-out text and what the model fills in: [model | truth]"
                  if any(_SENTINEL.search(example.inputs) for example in shown) else "Held-out examples:"]
    for number, example in enumerate(shown, 1):
        inputs, target, prediction = (text.replace("</s>", "").strip() for text in example)
        text, *rest = _SENTINEL.split(inputs)
        if rest:
            guesses, truths = _by_gap(prediction), _by_gap(target)
            for gap, following in list(zip(rest[::2], rest[1::2], strict=True))[:_MOST_GAPS]:
                text += f"[{guesses.get(gap, '')} | {truths.get(gap, '')}]{following}"
            text += "..." if len(rest) > 2 * _MOST_GAPS else ""
        else:
            words = inputs.split()
            text = " ".join(words[:_MOST_WORDS]) + ("..." if len(words) > _MOST_WORDS else "")
            text += f"\nmodel: {prediction}\ntruth: {target}"
        lines = [line for part in text.splitlines() for line in textwrap.wrap(part, 110)]
        paragraphs.append(f"{number}. " + "\n   ".join(lines))
    return "\n".join(paragraphs)


def _by_gap(text):
    """Returns the number of each sentinel -> the text after its first occurrence."""
    _, *rest = _SENTINEL.split(text)
    gaps = list(zip(rest[::2], rest[1::2], strict=True))
    return {number: following.strip() for number, following in reversed(gaps)}
