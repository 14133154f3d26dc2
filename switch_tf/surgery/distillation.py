"""Distillation (section 4.2): a model learns from the targets and from a larger model's predictions of them."""

import dataclasses
import functools
import pathlib
from typing import Any

import tensorflow as tf

from switch_tf import checks, context, losses
from switch_tf.checkpoints import folders, sizes, tensors
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats
from switch_tf.evaluation.objectives import Objective, target_features
from switch_tf.metrics import Measurements, RouterStats
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.surgery import sources


class Distillation(Objective):
    """A mixture of the cross-entropy to the targets and of that to a teacher's probabilities.

    The loss is `(1 - soft_weight) * cross_entropy + soft_weight * distillation`, plus the z-loss and the router losses
    of the student. "distillation" is T^2 times the cross-entropy between softmax(teacher / T) and softmax(student / T)
    (Hinton et al., 2015; Mesh TensorFlow's StudentTeacher), so its smallest value is the teacher's entropy, not 0. The
    term "teacher_cross_entropy", which the loss leaves out, is the teacher's own to the targets. The teacher has the
    layout of the student and no dropout, and gets no gradient.

    Args:
        teacher: str. Run folder, for its newest checkpoint, or checkpoint.
        soft_weight: float in [0, 1]. Share of the teacher's probabilities. 0.25 is the paper's best (Table 6).
        temperature: float above 0, T. The paper states none.
        teacher_capacity_factor: float or None. Capacity factor of the teacher's experts. None drops no token, as in
            predictions; on TPUs and GPUs a sparse layer then costs as much as one dense layer for each expert.
        dtype: str or None. Keras dtype policy of the teacher.

    Raises:
        Refusal: an argument is out of its range.
    """

    def __init__(self, teacher: str, soft_weight: float = 0.25, temperature: float = 1.0,
                 teacher_capacity_factor: float | None = None, dtype: str | None = None):
        self._folder = checks.place("TEACHER", teacher)
        self._soft_weight = checks.number("SOFT_WEIGHT", soft_weight, "in [0, 1]")
        self._temperature = checks.number("TEMPERATURE", temperature, "above 0")
        self._capacity_factor = checks.optional("Distillation.teacher_capacity_factor", teacher_capacity_factor,
                                                checks.number, "above 0")
        self._dtype = dtype
        self._teacher: SwitchTransformer
        self.coefficients = {"cross_entropy": 1 - self._soft_weight, "distillation": self._soft_weight,
                             "teacher_cross_entropy": 0.0}

    @functools.cached_property
    def _path(self) -> pathlib.Path:
        """The teacher's checkpoint, the same one for as long as this objective exists."""
        found = formats.find(self._folder)
        if found is not None and found is not formats.SWITCH_TF:
            raise Refusal(f"TEACHER must be a run folder or a checkpoint of switch_tf, and {self._folder} is in "
                          f"another format; convert it first: switch-tf convert --input {self._folder} --output "
                          "FOLDER")
        if found is None:
            raise Refusal(f"TEACHER must be a run folder with checkpoints, or one checkpoint; {self._folder} is "
                          "neither.")
        return folders.resolve(self._folder)

    @functools.cached_property
    def _description(self) -> dict[str, Any]:
        return folders.describe(self._path)

    @functools.cached_property
    def _config(self) -> SwitchConfig:
        config = sources.recorded_config(self._path)
        sizes.check(config, self._path)
        return config

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        teacher = self._config
        if config.vocab_size != teacher.vocab_size:
            raise Refusal(f"A teacher needs the student's vocab_size, {config.vocab_size}, and {self._path} has "
                          f"{teacher.vocab_size}; use another one, or SwitchConfig.vocab_size={teacher.vocab_size}.")
        if config.is_encoder_only != teacher.is_encoder_only:
            one, other = ("student", "teacher") if config.is_encoder_only else ("teacher", "student")
            raise Refusal(f"A teacher has to predict the student's targets, but the {one} is an encoder alone and the "
                          f"{other} has a decoder ({self._path}).")
        vocabulary = configuration["vocabulary"]
        if self._description["configuration"].get("vocabulary", vocabulary) != vocabulary:
            raise Refusal(f"The vocabulary of the teacher in {self._path} is not the student's, so their tokens "
                          "differ; set VOCABULARY to the one that the teacher was trained with, of which its run "
                          "folder keeps a copy.")

    def build(self, partitioner: Partitioner) -> None:
        config = self._config
        if self._capacity_factor is not None:
            config = dataclasses.replace(config, eval_capacity_factor=self._capacity_factor)
        self._teacher = SwitchTransformer(config, dtype=self._dtype, name="teacher")
        partitioner.build(self._teacher)

    def restore(self) -> None:
        tensors.restore(self._path, tensors.state_variables(self._teacher))

    @property
    def variables(self) -> list:
        return self._teacher.variables

    def get_config(self) -> dict[str, Any]:
        return {"teacher": folders.identity(self._description), "soft_weight": self._soft_weight,
                "temperature": self._temperature, "teacher_capacity_factor": self._capacity_factor}

    def for_evaluation(self) -> Objective:
        return Objective()

    def measure(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                router_stats: tuple[RouterStats, ...], settings: StepSettings) -> Measurements:
        measured = super().measure(config, features, logits, router_stats, settings)
        with context.within(no_drop=self._capacity_factor is None, routes=None):
            teacher_logits, _ = self._teacher.forward(features, training=False)
        teacher_logits = tf.stop_gradient(teacher_logits)
        targets, weights = (features[name] for name in target_features(config))
        soft = losses.soft_cross_entropy(logits, teacher_logits, weights, self._temperature)
        hard, _, _ = losses.cross_entropy(teacher_logits, targets, weights, z_loss_weight=0.0)
        return measured._replace(loss_terms={**measured.loss_terms, "distillation": soft,
                                             "teacher_cross_entropy": hard})
