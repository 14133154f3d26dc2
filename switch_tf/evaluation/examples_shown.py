"""A few held-out examples, and what a model makes of them beside the truth: to be read, not counted."""

import re
import textwrap
from typing import NamedTuple

import numpy as np

from switch_tf import data
from switch_tf.inference.programs import compile_prediction

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_MOST_GAPS = 3  # of an example; what follows is left out
_MOST_WORDS = 60  # of inputs without gaps


class Shown(NamedTuple):
    """Texts of one example: `inputs`, `target`, and the `prediction`, greedy."""

    inputs: str
    target: str
    prediction: str


def predict(model, run, partitioner) -> list[Shown]:
    """The first `run.shown_examples` of the validation split, at most a batch of them."""
    description = data.description_of_data(run, model.config, "validation", 0)
    examples = data.examples(description, min(run.shown_examples, run.batch_size))
    vocabulary = data.target_vocabulary(run.mixture_or_task_name, run.vocabulary)
    tokens = np.zeros((run.batch_size, run.task_feature_lengths["inputs"]), "int32")
    for row, example in zip(tokens, examples, strict=False):
        ids = example["inputs"]["ids"][:tokens.shape[1]]
        row[:len(ids)] = ids
    program = compile_prediction(model, run.task_feature_lengths["targets"], partitioner, vocabulary.eos_id)
    found = program({"encoder_input_tokens": tokens})
    return [Shown(example["inputs"]["text"], example["targets"]["text"], _text(vocabulary, ids))
            for example, ids in zip(examples, found, strict=False)]


def _text(vocabulary, ids):
    ids = ids.tolist()
    while ids and not ids[-1]:
        ids.pop()
    return data.spell(vocabulary, ids)


def describe(shown: list[Shown]) -> str:
    """Paragraphs to print: gaps as [model's words | the truth], or inputs, prediction and truth below each other."""
    paragraphs = ["Held-out text and what the model fills in: [model | truth]"
                  if any(_SENTINEL.search(one.inputs) for one in shown) else "Held-out examples:"]
    for number, one in enumerate(shown, 1):
        text = _filled(one) if _SENTINEL.search(one.inputs) else "\n".join([
            _cut(one.inputs), f"model: {_plain(one.prediction)}", f"truth: {_plain(one.target)}"])
        lines = [line for part in text.splitlines() for line in textwrap.wrap(part, 110)]
        paragraphs.append(f"{number}. " + "\n   ".join(lines))
    return "\n".join(paragraphs)


def _filled(one):
    guesses, truths = _by_gap(one.prediction), _by_gap(one.target)
    text, *rest = _SENTINEL.split(_plain(one.inputs))
    for number, following in list(zip(rest[::2], rest[1::2], strict=True))[:_MOST_GAPS]:
        text += f"[{guesses.get(number, '')} | {truths.get(number, '')}]{following}"
    return text + ("..." if len(rest) > 2 * _MOST_GAPS else "")


def _by_gap(text):
    """Number of each sentinel -> what follows it; of one that comes again, the first time counts."""
    _, *rest = _SENTINEL.split(_plain(text))
    found = {}
    for number, following in zip(rest[::2], rest[1::2], strict=True):
        found.setdefault(number, following.strip())
    return found


def _cut(text):
    words = _plain(text).split()
    return " ".join(words[:_MOST_WORDS]) + ("..." if len(words) > _MOST_WORDS else "")


def _plain(text):
    return text.replace("</s>", "").strip()
