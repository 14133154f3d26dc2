"""A teacher that runs beside the student, in the student's layout, without dropout and without a gradient."""

import dataclasses
import functools
import pathlib
from typing import Any

import tensorflow as tf

from switch_tf import checks, context, losses
from switch_tf.checkpoints import folders, sizes, tensors
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats
from switch_tf.evaluation.objectives import target_features
from switch_tf.metrics import Mean
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.surgery import sources


class LiveTeacher:
    """The model of a checkpoint.

    Args:
        folder: str. Run folder, for its newest checkpoint, or checkpoint.
        capacity_factor: float or None, see `Distillation`.
        dtype: str or None. Keras dtype policy.
        argument: str. The argument that names the folder, for messages.

    Raises:
        Refusal: an argument is out of its range.
    """

    def __init__(self, folder: str, capacity_factor: float | None = None, dtype: str | None = None,
                 argument: str = "TEACHER"):
        self._argument = argument
        self._folder = checks.place(argument, folder)
        self.capacity_factor = checks.optional("Distillation.teacher_capacity_factor", capacity_factor, checks.number,
                                               "above 0")
        self.dtype = dtype
        self.top_k: int | None = None  # all tokens
        self._model: SwitchTransformer

    @functools.cached_property
    def _path(self) -> pathlib.Path:
        """The teacher's checkpoint, the same one for as long as this object exists."""
        found = formats.find(self._folder)
        if found is not None and found is not formats.SWITCH_TF:
            raise Refusal(f"{self._argument} must be a run folder or a checkpoint of switch_tf, and {self._folder} is "
                          f"in another format; convert it first: switch-tf convert --input {self._folder} --output "
                          "FOLDER")
        if found is None:
            raise Refusal(f"{self._argument} must be a run folder with checkpoints, or one checkpoint; {self._folder} "
                          "is neither.")
        return folders.resolve(self._folder)

    @functools.cached_property
    def _description(self) -> dict[str, Any]:
        return folders.describe(self._path)

    @functools.cached_property
    def _config(self) -> SwitchConfig:
        config = sources.recorded_config(self._path)
        sizes.check(config, self._path)
        return config

    @property
    def identity(self) -> str:
        """`folders.identity` of the checkpoint."""
        return folders.identity(self._description)

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        """Raises Refusal unless this teacher predicts the student's targets. Arguments as in `Objective.check`."""
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
        """Creates the variables."""
        config = self._config
        if self.capacity_factor is not None:
            config = dataclasses.replace(config, eval_capacity_factor=self.capacity_factor)
        self._model = SwitchTransformer(config, dtype=self.dtype, name="teacher")
        partitioner.build(self._model)

    def restore(self) -> None:
        """Loads the weights of the checkpoint."""
        tensors.restore(self._path, tensors.state_variables(self._model))

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
