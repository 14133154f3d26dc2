"""Adversarial NLI (arXiv 1910.14599): `anli_r1`, `anli_r2`, `anli_r3`, one for each round, and `anli`, all three.

t5 has no such task. Its preprocessor for GLUE makes the text, in the form of MNLI. The Switch paper reports accuracy on
the third round and does not name the rounds that it trains on.
"""

import functools

import seqio

from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import metrics, postprocessors, preprocessors

# Task -> training examples.
SIZES = {"anli_r1": 16946, "anli_r2": 45460, "anli_r3": 100459}
LABELS = ["entailment", "neutral", "contradiction"]

for _name in SIZES:
    text_to_text.add_task(
        _name,
        f"anli/{_name.removeprefix('anli_')}:0.1.0",
        [
            functools.partial(
                text_to_text.plain(seqio.preprocessors.rekey),
                key_map={"premise": "context", "hypothesis": "hypothesis", "label": "label", "idx": "uid"},
            ),
            functools.partial(text_to_text.plain(preprocessors.glue), benchmark_name="anli", label_names=LABELS),
        ],
        metric_fns=[metrics.accuracy],
        postprocess_fn=functools.partial(postprocessors.string_label_to_class_id, label_classes=LABELS),
    )

text_to_text.add_mixture("anli", SIZES)
