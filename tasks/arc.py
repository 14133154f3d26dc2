"""AI2's Reasoning Challenge (arXiv 1803.05457): `arc_easy` and `arc_challenge`.

School questions with three to five choices. t5 has no such task. The inputs hold the choices, each with its letter, and
the answer is the letter of one.
"""

import functools

import seqio
import tensorflow as tf

from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import metrics, postprocessors

LETTERS = ["A", "B", "C", "D", "E"]


@seqio.map_over_dataset
def choose(example: dict) -> dict:
    """Converts `{"question": "Q", "choices": {"label": [0, 1], "text": ["x", "y"]}, "answerKey": 1}` to text.

    The inputs are "arc question: Q A: x B: y" and the targets "B".
    """
    letters = tf.gather(LETTERS, example["choices"]["label"])
    choices = tf.strings.reduce_join(letters + ": " + example["choices"]["text"], separator=" ")
    return {
        "inputs": tf.strings.join(["arc question:", example["question"], choices], separator=" "),
        "targets": tf.gather(LETTERS, example["answerKey"]),
        "id": example["id"],
    }


def _add_task(name, config):
    text_to_text.add_task(
        name,
        f"ai2_arc/{config}:1.0.0",
        [text_to_text.plain(choose)],
        metric_fns=[metrics.accuracy],
        postprocess_fn=functools.partial(postprocessors.string_label_to_class_id, label_classes=LETTERS),
    )


_add_task("arc_easy", "ARC-Easy")
_add_task("arc_challenge", "ARC-Challenge")
