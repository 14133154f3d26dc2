"""Winogrande (arXiv 1907.10641): which of two options fills the gap? One task for each size of its training set.

t5 has no such task; the text is made by its preprocessor for GLUE, in the form that it gives COPA. The Switch paper's
is `winogrande_xl`. The labels of the test set are not public.
"""

import functools

from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import metrics, postprocessors, preprocessors

# Task -> the training split of the data set.
TRAINING_SPLITS = {
    "winogrande_xs": "train_xs",
    "winogrande_s": "train_s",
    "winogrande_m": "train_m",
    "winogrande_l": "train_l",
    "winogrande_xl": "train_xl",
}
LABELS = ["option1", "option2"]

for _name, _training_split in TRAINING_SPLITS.items():
    text_to_text.add_task(
        _name,
        "winogrande:1.2.0",
        [
            functools.partial(
                text_to_text.plain(preprocessors.glue),
                benchmark_name="winogrande",
                label_names=LABELS,
                feature_names=("sentence", "option1", "option2"),
                id_key=None,
            )
        ],
        metric_fns=[metrics.accuracy],
        postprocess_fn=functools.partial(postprocessors.string_label_to_class_id, label_classes=LABELS),
        splits={"train": _training_split, "validation": "validation", "test": "test"},
    )
