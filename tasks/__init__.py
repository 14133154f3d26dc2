"""seqio tasks, installed as `switch_tf.tasks`; the rest of switch_tf knows them by name only.

Importing the package declares the names below and imports none of its modules: a module imports seqio and TensorFlow,
and adds its tasks to seqio's registry, when one of them is first needed.
"""

import functools
import importlib

from switch_tf.configs import names

# Module -> the tasks and mixtures that it registers. `mc4_span_corruption` stands for its languages, too.
TASKS = {
    "anli": ("anli", "anli_r1", "anli_r2", "anli_r3"),
    "arc": ("arc_challenge", "arc_easy"),
    "c4": ("c4_span_corruption",),
    "closed_book_qa": ("closed_book_qa", "natural_questions", "trivia_qa", "web_questions"),
    "docs_corpus": ("docs_corpus_masked_tokens", "docs_corpus_span_corruption", "docs_corpus_span_corruption_bytes"),
    "docs_corpus_supervised": ("docs_corpus_library", "docs_corpus_module", "docs_corpus_summary"),
    "glue": (
        "glue", "glue_equal", "glue_temperature", "glue_ax", "glue_cola", "glue_mnli", "glue_mnli_and_dev",
        "glue_mnli_matched", "glue_mnli_mismatched", "glue_mrpc", "glue_qnli", "glue_qqp", "glue_rte", "glue_sst2",
        "glue_stsb", "glue_wnli", "glue_wnli_simple_eval",
    ),
    "mc4": ("mc4_span_corruption",),
    "multi_task": ("multi_task_equal", "multi_task_proportional", "multi_task_temperature"),
    "random_facts": (
        "random_facts_5000", "random_facts_10000", "random_facts_20000", "random_facts_40000", "random_facts_80000",
    ),
    "source_corpus": ("source_corpus_span_corruption",),
    "squad": ("squad",),
    "summarization": ("cnn_dailymail", "xsum"),
    "super_glue": (
        "super_glue", "super_glue_equal", "super_glue_temperature", "super_glue_axb", "super_glue_axg",
        "super_glue_boolq", "super_glue_cb", "super_glue_copa", "super_glue_multirc", "super_glue_record",
        "super_glue_rte", "super_glue_wic", "super_glue_wsc_simple_eval", "super_glue_wsc_simple_train",
        "definite_pronoun_resolution",
    ),
    "translation": ("wmt14_en_de", "wmt14_en_fr", "wmt16_en_ro"),
    "winogrande": ("winogrande_l", "winogrande_m", "winogrande_s", "winogrande_xl", "winogrande_xs"),
}  # fmt: skip
# Names for VOCABULARY -> functions of `vocabularies`.
VOCABULARIES = {"docs_corpus": "docs_corpus", "source_corpus": "source_corpus", "bytes": "byte", "t5": "t5",
                "mt5": "mt5"}


def _vocabulary(function):
    return getattr(importlib.import_module(f"{__name__}.vocabularies"), function)()


for _module, _names in TASKS.items():
    names.declare_tasks(_names, functools.partial(importlib.import_module, f"{__name__}.{_module}"))
for _name, _function in VOCABULARIES.items():
    names.declare_vocabulary(_name, functools.partial(_vocabulary, _function))
