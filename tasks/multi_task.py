"""T5's mixtures of everything that it trains on (arXiv 1910.10683, section 3.5.2), by its three ways to weigh tasks.

* `multi_task_proportional`: by number of examples, at most 2^19 of a task.
* `multi_task_temperature`: by the square root of that number, at most 2^21.
* `multi_task_equal`: all alike.

The tasks are those of T5: C4, GLUE, SuperGLUE, CNN/DailyMail, SQuAD, and translation to German, French and Romanian,
where WMT 14's French replaces WMT 15's. RTE, which both benchmarks have, counts half in each, as in t5.
"""

from switch_tf.tasks import c4, glue, squad, summarization, super_glue, text_to_text, translation  # noqa: F401

SIZES = {
    "c4_span_corruption": None,
    **glue.SIZES,
    **super_glue.SIZES,
    "glue_rte": glue.SIZES["glue_rte"] / 2,
    "super_glue_rte": super_glue.SIZES["super_glue_rte"] / 2,
    "cnn_dailymail": None,
    "squad": None,
    "wmt14_en_de": None,
    "wmt14_en_fr": None,
    "wmt16_en_ro": None,
}

text_to_text.add_mixture("multi_task_proportional", SIZES, limit=2**19)
text_to_text.add_mixture("multi_task_temperature", SIZES, limit=2**21, temperature=2.0)
text_to_text.add_mixture("multi_task_equal", SIZES, temperature=float("inf"))
