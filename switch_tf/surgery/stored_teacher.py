"""A teacher whose predictions of the training rows were stored by `switch-tf cache --teacher`."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from switch_tf import checks, losses
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.data.batches import AddedFeatures
from switch_tf.evaluation.objectives import target_features
from switch_tf.metrics import Mean
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.surgery import prediction_rows
from switch_tf.surgery.prediction_rows import RowFormat
from switch_tf.surgery.prediction_store import PredictionStore, format_of


class StoredTeacher:
    """Reads predictions from a folder instead of running a `LiveTeacher`. It has no variables.

    Args:
        folder: str. Output of `switch-tf cache --teacher`.
        temperature: float above 0, which the predictions must have.

    Raises:
        Refusal: `folder` is no path.
    """

    variables: list = []

    def __init__(self, folder: str, temperature: float):
        self._folder = checks.path("TEACHER_PREDICTIONS", folder)
        self._temperature = temperature

    @functools.cached_property
    def _store(self) -> PredictionStore:
        return PredictionStore(self._folder)

    @property
    def _manifest(self) -> dict[str, Any]:
        return self._store.manifest

    @property
    def _format(self) -> RowFormat:
        return format_of(self._manifest)

    @property
    def identity(self) -> str:
        """`folders.identity` of the checkpoint whose predictions these are."""
        return self._manifest["teacher"]

    @property
    def capacity_factor(self) -> float | None:
        """Capacity factor of the teacher's experts, as in `Distillation`."""
        return self._manifest["teacher_capacity_factor"]

    @property
    def dtype(self) -> str | None:
        """Keras dtype policy of the teacher; None for predictions of earlier versions, which did not store it."""
        return self._manifest.get("teacher_dtype")

    @property
    def top_k(self) -> int:
        """Number of tokens that are stored for each target."""
        return self._manifest["top_k"]

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        """Raises Refusal unless these are predictions of the student's targets. Arguments as in `Objective.check`."""
        stored = self._manifest
        for name, there, here in (
                ("TEMPERATURE", stored["temperature"], self._temperature),
                ("vocabulary", stored["vocabulary"], configuration["vocabulary"]),
                ("TASK_FEATURE_LENGTHS", stored["task_feature_lengths"], configuration["TASK_FEATURE_LENGTHS"]),
                ("Run.pack", stored["pack"], configuration["Run.pack"])):
            if there != here:
                raise Refusal(f"The predictions in {self._folder} are for {name} {there!r}, and this run has {here!r}; "
                              "use that, cache again into another folder, or leave TEACHER_PREDICTIONS out to run the "
                              "teacher.")
        if stored["vocab_size"] > config.vocab_size:
            raise Refusal(f"The predictions in {self._folder} are for {stored['vocab_size']} ids, and this run has "
                          f"SwitchConfig.vocab_size {config.vocab_size}; use as many, or cache again into another "
                          "folder.")

    def build(self, partitioner: Partitioner) -> None:
        """Creates no variables."""

    def restore(self) -> None:
        """Loads no variables."""

    def added_features(self) -> AddedFeatures:
        """Returns the predictions as features of a batch."""
        return AddedFeatures(self._format.widths, self._of_rows)

    def _of_rows(self, features):
        is_filled = np.any([values.any(axis=1) for values in features.values()], axis=0)
        found = self._store.read(prediction_rows.keys({name: values[is_filled] for name, values in features.items()}))
        if found is None:
            raise Refusal(self._missing())
        added = {name: np.zeros((len(is_filled), width), np.int32) for name, width in self._format.widths.items()}
        for name, values in self._format.unpack(found).items():
            added[name][is_filled] = values
        return added

    def _missing(self):
        reads = " and ".join(f"{read['steps']} steps of SEED {read['seed']} with BATCH_SIZE {read['batch_size']}"
                             for read in self._manifest["reads"]) or "an unfinished command"
        return (f"A row of the next batch has no predictions in {self._folder}, which has those of {reads}; cache this "
                "run's with the same `switch-tf cache --teacher` and its SEED, BATCH_SIZE and TRAIN_STEPS, or leave "
                "TEACHER_PREDICTIONS out to run the teacher.")

    def cross_entropies(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                        temperature: float) -> dict[str, Mean]:
        """Returns the same as `LiveTeacher.cross_entropies`, with all tokens but k as one outcome."""
        weights = features[target_features(config)[1]]
        of_tokens = (-1, weights.shape[1], self.top_k)

        def floats(name):
            return tf.bitcast(features[name], tf.float32)

        predictions = losses.Predictions(tf.reshape(features[prediction_rows.IDS], of_tokens),
                                         tf.reshape(floats(prediction_rows.LOG_PROBS), of_tokens),
                                         floats(prediction_rows.LOG_REST))
        soft = losses.coarse_soft_cross_entropy(logits, predictions, weights, temperature)
        log_probs = tf.cast(floats(prediction_rows.TARGET_LOG_PROBS), soft.total.dtype)
        hard = -tf.reduce_sum(log_probs * tf.cast(weights, log_probs.dtype))
        return {"distillation": soft, "teacher_cross_entropy": Mean(hard, soft.weight)}
