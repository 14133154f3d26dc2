"""Restores trained runs from `config.json` and vocabulary copies, without gin files."""

import dataclasses
import pathlib
import types
from typing import Any

from switch_tf import data
from switch_tf.checkpoints import run_config
from switch_tf.data import vocabularies
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.dtypes import dtype_policy
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal


def from_config(saved: run_config.RunConfig, folder: pathlib.Path) -> types.SimpleNamespace | None:
    """Returns the run of a `config.json` on one device, or None if only code can create its vocabulary.

    Needs neither the task nor its data, and executes no code in the folder.
    """
    stored = {feature: vocabularies.Stored.from_data(fields) for feature, fields in saved.vocabularies.items()}
    if any(vocabulary.kind == vocabularies.OTHER for vocabulary in stored.values()):
        return None
    inputs, targets = (vocabularies.load(stored[feature], folder) for feature in ("inputs", "targets"))
    reading = data.Reading.from_data(saved.reading, inputs, targets)
    if (largest := max(vocabulary.size for vocabulary in stored.values())) > saved.model.vocab_size:
        raise Refusal(f"The model in {folder} has an embedding for {saved.model.vocab_size} ids, and its vocabulary "
                      f"has {largest}; config.json and the vocabulary are of different runs.")
    dtype = dtype_policy(saved.activation_dtype) if saved.activation_dtype else saved.dtype
    return types.SimpleNamespace(
        config=saved.model, partitioner=Partitioner(), reading=reading,
        run=types.SimpleNamespace(mixture_or_task_name=saved.task, task_feature_lengths=saved.task_feature_lengths),
        make_model=lambda: SwitchTransformer(saved.model, dtype=dtype))


def use_stored_vocabulary(described: Any, folder: pathlib.Path) -> Any:
    """Returns a run from gin files with the run folder's copy of its vocabulary, if task and vocabulary match.

    Folders of earlier versions have neither `config.json` nor copies.
    """
    if not run_config.is_in(folder):
        return described
    saved = run_config.read(folder)
    vocabulary, *differing = {vocabularies.Stored.from_data(fields) for fields in saved.vocabularies.values()}
    run = described.run
    if differing or run.mixture_or_task_name != saved.task or run.vocabulary not in (None, vocabulary.name):
        return described
    choice = vocabularies.choice_of(vocabulary, folder) or run.vocabulary
    return dataclasses.replace(described, run=dataclasses.replace(run, vocabulary=choice))
