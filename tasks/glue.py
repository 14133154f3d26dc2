"""GLUE (arXiv 1804.07461) as text to text, by t5's own preprocessors and metrics, and its mixtures.

The data are `glue/*:2.0.0`, the version that tensorflow-datasets 4.9.10 can prepare; t5's own tasks name 1.0.0. As in
t5, `glue_mnli` has the training split alone and its two development sets are tasks of their own, WNLI is no part of
the mixtures, and a task's weight in them is its number of training examples. MNLI's two development sets share the
weight of MNLI in a held-out loss, and count once in an average, as in GLUE's own.
"""

from tensorflow_datasets.text import glue

from switch_tf.data import evaluation_sets
from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import glue_utils, metrics, postprocessors, preprocessors

# Task -> config of the data set.
CONFIGS = {
    "glue_cola": "cola",
    "glue_sst2": "sst2",
    "glue_mrpc": "mrpc",
    "glue_qqp": "qqp",
    "glue_stsb": "stsb",
    "glue_mnli": "mnli",
    "glue_mnli_matched": "mnli_matched",
    "glue_mnli_mismatched": "mnli_mismatched",
    "glue_qnli": "qnli",
    "glue_rte": "rte",
    "glue_wnli": "wnli",
    "glue_ax": "ax",
}
# Those that do not have the usual three.
SPLITS = {
    "glue_mnli": ("train",),
    "glue_mnli_matched": ("validation", "test"),
    "glue_mnli_mismatched": ("validation", "test"),
    "glue_ax": ("test",),
}
SIZES = {
    name: glue_utils.GLUE_WEIGHT_MAPPING[f"{name}_v002"]
    for name in CONFIGS
    if f"{name}_v002" in glue_utils.GLUE_WEIGHT_MAPPING
}

for _name, _config in CONFIGS.items():
    _builder_config = glue.Glue.builder_configs[_config]
    text_to_text.add_task(
        _name,
        f"glue/{_config}:2.0.0",
        [text_to_text.plain(glue_utils.get_glue_text_preprocessor(_builder_config))],
        metric_fns=glue_utils.get_glue_metric(_config),
        postprocess_fn=glue_utils.get_glue_postprocess_fn(_builder_config),
        splits=SPLITS.get(_name, text_to_text.TRAIN_VALIDATION_TEST),
    )

# WNLI for a model trained on pronouns (`super_glue_wsc_simple_train`): which noun does the marked one stand for?
text_to_text.add_task(
    "glue_wnli_simple_eval",
    "glue/wnli:2.0.0",
    [text_to_text.plain(preprocessors.wnli_simple)],
    metric_fns=[metrics.accuracy],
    postprocess_fn=postprocessors.wsc_simple,
    splits=("validation", "test"),
)

evaluation_sets.register_evaluation_sets("glue_mnli", ["glue_mnli_matched", "glue_mnli_mismatched"])

text_to_text.add_mixture("glue", SIZES)
text_to_text.add_mixture("glue_equal", SIZES, temperature=float("inf"))
text_to_text.add_mixture("glue_temperature", SIZES, temperature=2.0)
text_to_text.add_mixture("glue_mnli_and_dev", {name: size for name, size in SIZES.items() if "mnli" in name})
