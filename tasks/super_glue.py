"""SuperGLUE (arXiv 1905.00537) as text to text, by t5's own preprocessors and metrics, and its mixtures.

The data are `super_glue/*:1.0.2`. As in t5, the Winograd schemas (WSC) are trained as "which noun does the marked
pronoun stand for?", on schemas with the right referent and on Definite Pronoun Resolution, and evaluated unchanged. The
two diagnostic sets, AX-b and AX-g, are read like RTE and only evaluated.
"""

import functools

import seqio
from tensorflow_datasets.text import super_glue

from switch_tf.data import evaluation_sets
from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import glue_utils, metrics, postprocessors, preprocessors

# Task -> config of the data set.
CONFIGS = {
    "super_glue_boolq": "boolq",
    "super_glue_cb": "cb",
    "super_glue_copa": "copa",
    "super_glue_multirc": "multirc",
    "super_glue_record": "record",
    "super_glue_rte": "rte",
    "super_glue_wic": "wic",
    "super_glue_axb": "axb",
    "super_glue_axg": "axg",
}
# t5 has none for the diagnostic sets. These are the benchmark's; the gender parity of AX-g needs to know which
# two examples differ in the pronoun alone, and the data set has dropped that.
DIAGNOSTIC_METRICS = {
    "axb": [
        metrics.sklearn_metrics_wrapper("matthews_corrcoef", metric_post_process_fn=lambda value: 100 * value),
    ],
    "axg": [metrics.accuracy],
}
SIZES = {
    **{name: glue_utils.SUPER_GLUE_WEIGHT_MAPPING[f"{name}_v102"] for name in CONFIGS},
    "super_glue_wsc_simple_train": glue_utils.SUPER_GLUE_WEIGHT_MAPPING["super_glue_wsc_v102_simple_train"],
    "super_glue_wsc_simple_eval": glue_utils.SUPER_GLUE_WEIGHT_MAPPING["super_glue_wsc_v102_simple_eval"],
    "definite_pronoun_resolution": glue_utils.SUPER_GLUE_WEIGHT_MAPPING["dpr_v001_simple"],
}

for _name, _config in CONFIGS.items():
    _builder_config = super_glue.SuperGlue.builder_configs[_config]
    _steps = [text_to_text.plain(glue_utils.get_glue_text_preprocessor(_builder_config))]
    if _config == "axb":
        _names = {"premise": "sentence1", "hypothesis": "sentence2", "label": "label", "idx": "idx"}
        _steps.insert(0, functools.partial(text_to_text.plain(seqio.preprocessors.rekey), key_map=_names))
    text_to_text.add_task(
        _name,
        f"super_glue/{_config}:1.0.2",
        _steps,
        metric_fns=DIAGNOSTIC_METRICS.get(_config) or glue_utils.get_super_glue_metric(_config),
        postprocess_fn=glue_utils.get_glue_postprocess_fn(_builder_config),
        splits=("test",) if _config in DIAGNOSTIC_METRICS else text_to_text.TRAIN_VALIDATION_TEST,
    )

text_to_text.add_task(
    "super_glue_wsc_simple_train",
    "super_glue/wsc.fixed:1.0.2",
    [functools.partial(preprocessors.wsc_simple, correct_referent_only=True)],  # it branches on a tensor
    metric_fns=[],
    splits=("train",),
)
text_to_text.add_task(
    "super_glue_wsc_simple_eval",
    "super_glue/wsc.fixed:1.0.2",
    [preprocessors.wsc_simple],
    metric_fns=[metrics.accuracy],
    postprocess_fn=postprocessors.wsc_simple,
    splits=("validation", "test"),
)
text_to_text.add_task(
    "definite_pronoun_resolution",
    "definite_pronoun_resolution:1.1.0",
    [text_to_text.plain(preprocessors.definite_pronoun_resolution_simple)],
    metric_fns=[metrics.accuracy],
    splits=("train", "test"),
)

evaluation_sets.register_evaluation_sets("super_glue_wsc_simple_train", ["super_glue_wsc_simple_eval"])

text_to_text.add_mixture("super_glue", SIZES)
text_to_text.add_mixture("super_glue_equal", SIZES, temperature=float("inf"))
text_to_text.add_mixture("super_glue_temperature", SIZES, temperature=2.0)
