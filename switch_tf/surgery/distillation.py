"""Distillation (section 4.2): a model learns from the targets and from a larger model's predictions of them."""

from typing import Any

from switch_tf import checks
from switch_tf.configs.run import StepSettings
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.data.batches import AddedFeatures
from switch_tf.evaluation.objectives import Objective
from switch_tf.metrics import Measurements, RouterStats
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.surgery.teachers import LiveTeacher, StoredTeacher


class Distillation(Objective):
    """A mixture of the cross-entropy to the targets and of that to a teacher's probabilities.

    The loss is `(1 - soft_weight) * cross_entropy + soft_weight * distillation`, plus the z-loss and the router losses
    of the student. "distillation" is T^2 times the cross-entropy between softmax(teacher / T) and softmax(student / T)
    (Hinton et al., 2015; Mesh TensorFlow's StudentTeacher), so its smallest value is the teacher's entropy, not 0. The
    term "teacher_cross_entropy", which the loss leaves out, is the teacher's own to the targets. A teacher with the
    student's vocabulary may have another number of rows. "teacher_unshared", which the loss leaves out, is then its
    probability of ids that the student lacks; the others are scaled up. The teacher has the layout of the student and
    no dropout, and gets no gradient. With `predictions` no teacher runs, and all tokens but
    the stored ones are one outcome (`losses.coarse_soft_cross_entropy`).

    Args:
        teacher: str. Run folder, for its newest checkpoint, or checkpoint. Not read with `predictions`.
        soft_weight: float in [0, 1]. Share of the teacher's probabilities. 0.25 is the paper's best (Table 6).
        temperature: float above 0, T. The paper states none.
        teacher_capacity_factor: float or None. Capacity factor of the experts of a teacher that runs. None drops no
            token, as in predictions; on TPUs and GPUs a sparse layer then costs as much as one dense layer for each
            expert. Required if experts choose tokens.
        dtype: str or None. Keras dtype policy of a teacher that runs.
        predictions: str or None. Folder of `switch-tf cache --teacher`, to read the teacher's predictions from.
    """

    def __init__(self, teacher: str, soft_weight: float = 0.25, temperature: float = 1.0,
                 teacher_capacity_factor: float | None = None, dtype: str | None = None,
                 predictions: str | None = None):
        self._soft_weight = checks.number("SOFT_WEIGHT", soft_weight, "in [0, 1]")
        self.temperature = checks.number("TEMPERATURE", temperature, "above 0")
        self.live_teacher = LiveTeacher(teacher, teacher_capacity_factor, dtype)  # not built with `predictions`
        self._teacher = self.live_teacher if predictions is None else StoredTeacher(predictions, self.temperature)
        self.coefficients = {"cross_entropy": 1 - self._soft_weight, "distillation": self._soft_weight,
                             "teacher_cross_entropy": 0.0, "teacher_unshared": 0.0}

    def check(self, config: SwitchConfig, configuration: dict[str, Any]) -> None:
        self._teacher.check(config, configuration)

    def build(self, partitioner: Partitioner) -> None:
        self._teacher.build(partitioner)

    def restore(self) -> None:
        self._teacher.restore()

    @property
    def variables(self) -> list:
        return self._teacher.variables

    def added_features(self) -> AddedFeatures | None:
        return self._teacher.added_features()

    def get_config(self) -> dict[str, Any]:
        return {**self._teacher.record(), "soft_weight": self._soft_weight, "temperature": self.temperature}

    def for_evaluation(self) -> Objective:
        return Objective()

    def measure(self, config: SwitchConfig, features: dict[str, Any], logits: Any,
                router_stats: tuple[RouterStats, ...], settings: StepSettings) -> Measurements:
        measured = super().measure(config, features, logits, router_stats, settings)
        terms = self._teacher.cross_entropies(config, features, logits, self.temperature)
        return measured._replace(loss_terms=measured.loss_terms | terms)
