"""`squad`: SQuAD 1.1 (arXiv 1606.05250), an answer from a paragraph, by t5's own preprocessor.

Trained on the first answer, evaluated against all of them.
"""

from t5.data import postprocessors, preprocessors
from t5.evaluation import metrics

from switch_tf.tasks import text_to_text

text_to_text.add_task(
    "squad",
    "squad/v1.1:3.0.0",
    [text_to_text.plain(preprocessors.squad)],
    metric_fns=[metrics.squad],
    postprocess_fn=postprocessors.qa,
    splits=("train", "validation"),
)
