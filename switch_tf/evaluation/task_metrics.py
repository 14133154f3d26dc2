"""The metrics of tasks, computed from a model's predictions and likelihoods."""

from collections.abc import Callable

import keras

from switch_tf import data
from switch_tf.decoding import check_decodes
from switch_tf.inference.programs import compile_log_likelihoods, compile_prediction
from switch_tf.partitioning.partitioner import Partitioner


class TaskMetrics:
    """Computes the metrics of a task or mixture on one split, as often as the model's weights change.

    Predictions are greedy and as long as the description's targets. No expert drops a token
    (`context.Context.no_drop`), so scores depend neither on the batch size nor on the layout.

    Args:
        model: SwitchTransformer, built.
        description: data.DatasetDescription. The last batch is padded to its `batch_size`.
        partitioner: Partitioner.
        num_examples: int or None. Largest number of examples of each task.

    Raises:
        Refusal: no task has metrics, or the model cannot predict.
    """

    def __init__(self, model: keras.Model, description: data.DatasetDescription, partitioner: Partitioner,
                 num_examples: int | None = None):
        check_decodes(model.config)
        self._evaluator = data.Evaluator(description, num_examples)
        self.num_examples = self._evaluator.num_examples
        self.warnings = self._evaluator.warnings
        self._predict = compile_prediction(model, description.task_feature_lengths["targets"], partitioner,
                                           self._evaluator.end_id)
        self._score = compile_log_likelihoods(model, partitioner)

    def run(self, advance: Callable[[int], None] = lambda count: None,
            has_records: bool = True) -> dict[str, data.TaskScores]:
        """Returns task -> data.TaskScores, for each task with metrics. Arguments as in `data.Evaluator.evaluate`."""
        return self._evaluator.evaluate(self._predict, self._score, advance, has_records)
