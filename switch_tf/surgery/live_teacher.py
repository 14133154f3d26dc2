"""A teacher that runs beside the student, in the student's layout, without dropout and without a gradient."""

import dataclasses
from typing import Any

import tensorflow as tf

from switch_tf import checks, context, losses
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import target_features
from switch_tf.metrics import Mean
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.surgery.teacher_weights import TeacherWeights


class LiveTeacher:
    """The model of a checkpoint.

    Args:
        folder: str. Run folder, for its newest checkpoint, checkpoint, or folder of another format.
        capacity_factor: float or None, see `Distillation`.
        dtype: str or None. Keras dtype policy.
        argument: str. The argument that names the folder, for messages.

    Raises:
        Refusal: an argument is out of its range.
    """

    def __init__(self, folder: str, capacity_factor: float | None = None, dtype: str | None = None,
                 argument: str = "TEACHER"):
        self._weights = TeacherWeights(folder, argument)
        self.capacity_factor = checks.optional("Distillation.teacher_capacity_factor", capacity_factor, checks.number,
                                               "above 0")
        self.dtype = dtype
        self.top_k: int | None = None  # all tokens
        self._model: SwitchTransformer

    @property
    def identity(self) -> str:
        """See `TeacherWeights.identity`."""
        return self._weights.identity

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        """Raises Refusal unless this teacher predicts the student's targets. Arguments as in `Objective.check`."""
        teacher, path = self._weights.config, self._weights.path
        if config.vocab_size != teacher.vocab_size:
            raise Refusal(f"A teacher needs the student's vocab_size, {config.vocab_size}, and {path} has "
                          f"{teacher.vocab_size}; use another one, or SwitchConfig.vocab_size={teacher.vocab_size}.")
        if config.is_encoder_only != teacher.is_encoder_only:
            one, other = ("student", "teacher") if config.is_encoder_only else ("teacher", "student")
            raise Refusal(f"A teacher has to predict the student's targets, but the {one} is an encoder alone and the "
                          f"{other} has a decoder ({path}).")
        if self._weights.vocabulary not in (None, configuration["vocabulary"]):
            raise Refusal(f"The vocabulary of the teacher in {path} is not the student's, so their tokens "
                          "differ; set VOCABULARY to the one that the teacher was trained with, of which its run "
                          "folder keeps a copy.")

    def build(self, partitioner: Partitioner) -> None:
        """Creates the variables."""
        config = self._weights.config
        if self.capacity_factor is not None:
            config = dataclasses.replace(config, eval_capacity_factor=self.capacity_factor)
        self._model = SwitchTransformer(config, dtype=self.dtype, name="teacher")
        partitioner.build(self._model)

    def restore(self) -> None:
        """Loads the weights."""
        self._weights.restore(self._model)

    @property
    def variables(self) -> list:
        """Keras variables."""
        return self._model.variables

    def added_features(self) -> None:
        """Returns None: the teacher reads what the student reads."""
        return None

    def logits(self, features: dict[str, Any]) -> Any:
        """Returns <float32>[batch, length, vocab] of features, dict of <int32>[batch, length]."""
        with context.within(no_drop=self.capacity_factor is None, routes=None):
            logits, _ = self._model.forward(features, training=False)
        return tf.stop_gradient(logits)

    def cross_entropies(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                        temperature: float) -> tuple[Mean, Mean]:
        """Returns the student's cross-entropy to this teacher, times T^2, and the teacher's own to the targets.

        Args:
            config: SwitchConfig of the student.
            features: dict of <int32>[batch, length].
            logits: <float32>[batch, length, vocab] of the student.
            temperature: float above 0, T.
        """
        targets, weights = (features[name] for name in target_features(config))
        teacher_logits = self.logits(features)
        hard, _, _ = losses.cross_entropy(teacher_logits, targets, weights, z_loss_weight=0.0)
        return losses.soft_cross_entropy(logits, teacher_logits, weights, temperature), hard
