"""Batches of model features from the name of a seqio task or mixture.

The only package that imports seqio, and only when a function needs it.
"""

# ruff: noqa: F401  the names are for other packages

from switch_tf.configs.names import declare_vocabulary as register_vocabulary
from switch_tf.data.batches import AddedFeatures, Batches, get_batches
from switch_tf.data.cache_writing import Shard, finish_cache, is_complete, plan_cache, write_shard
from switch_tf.data.evaluator import (
    Evaluator,
    TaskScores,
    average,
    declares_directions,
    has_metrics,
    names_of_tasks,
    write_records,
)
from switch_tf.data.example_files import BadData, TextFile, examples_of_lines, find_files, kind_of
from switch_tf.data.pipeline import (
    DatasetDescription,
    bad_row,
    check_examples,
    description_of_data,
    examples,
    fingerprint,
    get_dataset,
    refusing_bad_rows,
)
from switch_tf.data.reading import (
    Reading,
    SpellingOps,
    pieces,
    read_text,
    reading_of,
    spell,
    spellings,
    typed_sentinels,
)
from switch_tf.data.task_catalog import describe, pieces_fingerprint, vocabulary_fingerprint
from switch_tf.data.vocabularies import (
    NUM_SENTINELS,
    check_task,
    check_vocabulary,
    get_vocabulary,
    keep_jax_on_cpu,
    passes,
    target_vocabulary,
    vocabulary_size,
)
from switch_tf.data.vocabularies import all_names as names
