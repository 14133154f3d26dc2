"""A teacher that runs beside the student, in the student's layout, without dropout and without a gradient."""

import dataclasses
from typing import Any

import tensorflow as tf

from switch_tf import checks, context, losses
from switch_tf.configs import policies
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.evaluation.objectives import target_features
from switch_tf.metrics import Mean
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.indexing import LEFT_OUT
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal
from switch_tf.surgery.teacher_weights import TeacherWeights

_ALL = 2**31 - 1  # slots of an expert for a sequence: as many as tokens


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
        # Checkpoints of earlier versions recorded the bytes of their vocabularies alone.
        name, own = ("pieces", self._weights.pieces) if self._weights.pieces else ("vocabulary",
                                                                                   self._weights.vocabulary)
        if own is None and config.vocab_size != teacher.vocab_size:
            raise Refusal(f"A teacher needs the student's vocab_size, {config.vocab_size}, or its vocabulary, and "
                          f"{path} has {teacher.vocab_size} rows and no vocabulary to compare; put its spiece.model "
                          f"there, or use SwitchConfig.vocab_size={teacher.vocab_size}.")
        if config.is_encoder_only != teacher.is_encoder_only:
            one, other = ("student", "teacher") if config.is_encoder_only else ("teacher", "student")
            raise Refusal(f"A teacher has to predict the student's targets, but the {one} is an encoder alone and the "
                          f"{other} has a decoder ({path}).")
        if own not in (None, configuration[name]):
            raise Refusal(f"The vocabulary of the teacher in {path} is not the student's, so their tokens "
                          "differ; set VOCABULARY to the one that the teacher was trained with, of which its run "
                          "folder keeps a copy.")
        self._check_drops()

    def _check_drops(self):
        """Refuses a capacity factor, or the lack of one, that the teacher's routing does not allow."""
        teacher, path = self._weights.config, self._weights.path
        if not teacher.sparse_layer_names:
            return
        chosen = [policies.get(policy).experts_choose for policy, layers in (
            (teacher.routing_policy, teacher.encoder_sparse_layers),
            (teacher.decoder_policy, teacher.decoder_sparse_layers)) if layers]
        if self.capacity_factor is None and any(chosen):
            raise Refusal(f"The experts of the teacher in {path} choose tokens and leave out others at any capacity; "
                          "set Distillation.teacher_capacity_factor, such as the teacher's own in evaluation, "
                          f"{teacher.eval_capacity_factor}.")
        if self.capacity_factor is not None and teacher.rules.groups_are_sequences:
            raise Refusal(f"Distillation.teacher_capacity_factor has no effect on the teacher in {path}, which has a "
                          f"fixed capacity (semantics={teacher.semantics!r}); leave it out, and no token is dropped.")

    def build(self, partitioner: Partitioner) -> None:
        """Creates the variables."""
        config = self._weights.config
        if self.capacity_factor is not None:
            config = dataclasses.replace(config, eval_capacity_factor=self.capacity_factor)
        elif config.rules.groups_are_sequences:
            config = dataclasses.replace(config, expert_capacity=_ALL)
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

    def shared_logits(self, config: SwitchConfig, features: dict[str, Any]) -> tuple[Any, Any]:
        """Returns logits of the student's ids, and the probability of the teacher's other ids.

        Rows of a vocabulary are filled up to other numbers in other software, so tables may differ in size.

        Args:
            config: SwitchConfig of the student.
            features: dict of <int32>[batch, length].

        Returns:
            <float32>[batch, length, vocab of the student], and <float32>[batch, length] or None if there are no others.
        """
        logits = self.logits(features)
        missing = config.vocab_size - logits.shape[-1]
        if not missing:
            return logits, None
        if missing > 0:
            return tf.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=LEFT_OUT), None
        shared, others = logits[..., :missing], logits[..., missing:]
        others = tf.reduce_logsumexp(others, axis=-1) - tf.reduce_logsumexp(logits, axis=-1)
        return shared, tf.exp(others)

    def cross_entropies(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                        temperature: float) -> dict[str, Mean]:
        """Returns the terms of `Distillation`, and "teacher_unshared" if the teacher has ids that the student lacks.

        "distillation" is the student's cross-entropy to this teacher, times T^2, "teacher_cross_entropy" the teacher's
        own to the targets, and "teacher_unshared" its probability of ids that the student lacks.

        Args:
            config: SwitchConfig of the student.
            features: dict of <int32>[batch, length].
            logits: <float32>[batch, length, vocab] of the student.
            temperature: float above 0, T.
        """
        targets, weights = (features[name] for name in target_features(config))
        teacher_logits, unshared = self.shared_logits(config, features)
        hard, _, _ = losses.cross_entropy(teacher_logits, targets, weights, z_loss_weight=0.0)
        terms = {"distillation": losses.soft_cross_entropy(logits, teacher_logits, weights, temperature),
                 "teacher_cross_entropy": hard}
        if unshared is None:
            return terms
        weights = tf.cast(weights, unshared.dtype)
        return terms | {"teacher_unshared": Mean(tf.reduce_sum(unshared * weights), tf.reduce_sum(weights))}
