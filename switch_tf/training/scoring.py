"""The metrics of tasks: what a model predicts for a split, scored as its tasks score it."""

from switch_tf import data
from switch_tf.decoding import check_decodes
from switch_tf.inference.programs import compile_log_likelihoods, compile_prediction


class Scoring:
    """Scores a model on one split of a task or mixture, again and again as its weights change.

    Predictions are greedy and as long as the description's targets. No expert drops a token
    (`grouping.every_token_served`), so that a score depends neither on the batch size nor on the layout.

    Args:
        model: SwitchTransformer, built.
        description: data.DatasetDescription. A last batch is filled up to its `batch_size`.
        partitioner: Partitioner.
        num_examples: int or None, at most so many of each task.

    Raises:
        ValueError: no task has metrics, or the model cannot predict.
    """

    def __init__(self, model, description, partitioner, num_examples=None):
        check_decodes(model.config)
        self._evaluator = data.Evaluator(description, num_examples)
        self.num_examples = self._evaluator.num_examples
        self._predict = compile_prediction(model, description.task_feature_lengths["targets"], partitioner,
                                           self._evaluator.end_id)
        self._score = compile_log_likelihoods(model, partitioner)

    def run(self, advance=lambda count: None, has_records=True) -> dict:
        """Name of each task that has metrics -> data.TaskScores; arguments as of `data.Evaluator.evaluate`."""
        return self._evaluator.evaluate(self._predict, self._score, advance, has_records)


def values(scores: dict) -> dict[str, float]:
    """What is written of scores: `eval/<task>/<metric>` -> float, and `eval/average` where tasks are several."""
    found = {f"eval/{task}/{name}": value for task, of_task in scores.items()
             for name, value in of_task.metrics.items()}
    return {**found, "eval/average": data.average(scores)} if len(scores) > 1 else found
