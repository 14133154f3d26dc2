"""Runs a teacher on the training batches of a run and stores its predictions."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from switch_tf import data, losses
from switch_tf.configs.experiment import Experiment
from switch_tf.evaluation.objectives import target_features
from switch_tf.inference import programs
from switch_tf.ops import dtypes, indexing
from switch_tf.reporting import progress
from switch_tf.surgery import prediction_rows, prediction_writing
from switch_tf.surgery.live_teacher import LiveTeacher
from switch_tf.surgery.prediction_rows import RowFormat, RowPredictions


def request_of(described: Experiment, teacher: LiveTeacher, temperature: float, top_k: int,
               vocabulary: list[str]) -> dict[str, Any]:
    """Returns what predictions depend on, JSON-able, for the manifest. `vocabulary` is its fingerprint; see `store`."""
    return {"teacher": teacher.identity, "teacher_capacity_factor": teacher.capacity_factor,
            "teacher_dtype": teacher.dtype,
            "temperature": temperature, "top_k": top_k, "vocab_size": described.config.vocab_size,
            "vocabulary": vocabulary, "pack": described.run.pack,
            "task_feature_lengths": dict(described.run.task_feature_lengths)}


def store(described: Experiment, teacher: LiveTeacher, temperature: float, top_k: int, folder: Any) -> dict[str, Any]:
    """Stores the predictions of all training rows of a run that are not there yet.

    Args:
        described: Experiment on this machine's devices, of one process, with its final VOCABULARY.
        teacher: LiveTeacher, checked and not built.
        temperature: float above 0.
        top_k: int. Number of tokens to store for each target.
        folder: Path that `prediction_writing.begin` accepted.

    Returns:
        dict of `rows` and `bytes` of the whole folder, of `new_rows` and `new_targets`, and of `unshared`, the
        teacher's mean probability of ids that the student lacks, at new targets.

    Raises:
        Refusal: the data cannot be read, or the folder cannot be written.
    """
    run, config, partitioner = described.run, described.config, described.partitioner
    writer = prediction_writing.PredictionWriter(folder)
    teacher.build(partitioner)
    teacher.restore()
    description = data.description_of_data(run, config, "train", run.seed)
    batches = data.get_batches(description)
    names = list(batches.element_spec)
    predict = programs.compile_arrays(functools.partial(_predict, teacher, config, temperature, top_k, names),
                                      partitioner)
    row_format = RowFormat(run.task_feature_lengths["targets"], top_k, config.vocab_size)
    num_before, num_targets, unshared = len(writer), 0, 0.0
    try:
        with progress.bar(run.train_steps, "storing predictions", " steps") as bar, data.refusing_bad_rows(description):
            for _ in range(run.train_steps):
                batch = {name: np.asarray(value)[0] for name, value in next(batches).items()}
                targets, mass = _store_batch(batch, names, predict, config, row_format, writer)
                num_targets, unshared = num_targets + targets, unshared + mass
                bar.set_postfix_str(f"{len(writer):,} rows", refresh=False)
                bar.update()
    finally:
        batches.close()
    writer.flush()
    prediction_writing.note_read(folder, {
        "task": run.mixture_or_task_name, "seed": run.seed, "batch_size": run.batch_size, "steps": run.train_steps,
        "data": data.fingerprint(description)})
    return {"rows": len(writer), "bytes": prediction_writing.num_bytes(folder), "new_rows": len(writer) - num_before,
            "new_targets": num_targets, "unshared": unshared / max(1, num_targets)}


def _predict(teacher, config, temperature, top_k, names, *arrays):
    """Returns RowPredictions of the features `names`, <int32>[batch, length] each, and the mass of unshared ids."""
    features = dict(zip(names, arrays, strict=True))
    logits, unshared = teacher.shared_logits(config, features)
    logits = dtypes.widen(logits)
    normalizer, target_logit, _ = indexing.normalizers_and_targets(logits, features[target_features(config)[0]])
    return (RowPredictions(*losses.most_probable(logits, top_k, temperature), target_logit - normalizer),
            tf.zeros_like(normalizer) if unshared is None else unshared)


def _store_batch(batch, names, predict, config, row_format, writer):
    """Stores the rows of a batch that are not there; returns the number of their targets and their unshared mass."""
    keys = prediction_rows.keys(batch)
    new = writer.lacks(keys)
    if not len(new):
        return 0, 0.0
    # The whole batch, so that a teacher with a capacity factor drops the tokens that it would drop in training.
    found, unshared = predict(*(batch[name] for name in names))
    is_target = batch[target_features(config)[1]][new] > 0
    writer.add(keys[new], row_format.pack(RowPredictions(*(values[new] for values in found)), is_target))
    return int(is_target.sum()), float(unshared[new][is_target].sum())
