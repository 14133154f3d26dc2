"""`squad`: SQuAD 1.1 (arXiv 1606.05250), an answer from a paragraph, by t5's own preprocessor.

Trained on the first answer, evaluated against all of them.
"""

from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import metrics, postprocessors, preprocessors

text_to_text.add_task(
    "squad",
    "squad/v1.1:3.0.0",
    [text_to_text.plain(preprocessors.squad)],
    metric_fns=[metrics.squad],
    postprocess_fn=postprocessors.qa,
    splits=("train", "validation"),
)
