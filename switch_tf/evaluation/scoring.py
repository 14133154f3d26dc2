"""The metrics of tasks: what a model predicts for a split, scored as its tasks score it."""

from switch_tf import data
from switch_tf.configs import directions
from switch_tf.decoding import check_decodes
from switch_tf.inference.programs import compile_log_likelihoods, compile_prediction


class Scoring:
    """Scores a model on one split of a task or mixture, again and again as its weights change.

    Predictions are greedy and as long as the description's targets. No expert drops a token
    (`grouping.no_drop`), so that a score depends neither on the batch size nor on the layout.

    Args:
        model: SwitchTransformer, built.
        description: data.DatasetDescription. A last batch is filled up to its `batch_size`.
        partitioner: Partitioner.
        num_examples: int or None, at most so many of each task.

    Raises:
        Refusal: no task has metrics, or the model cannot predict.
    """

    def __init__(self, model, description, partitioner, num_examples=None):
        check_decodes(model.config)
        self._evaluator = data.Evaluator(description, num_examples)
        self.num_examples = self._evaluator.num_examples
        self.warnings = self._evaluator.warnings
        self._predict = compile_prediction(model, description.task_feature_lengths["targets"], partitioner,
                                           self._evaluator.end_id)
        self._score = compile_log_likelihoods(model, partitioner)

    def run(self, advance=lambda count: None, has_records=True) -> dict:
        """Name of each task that has metrics -> data.TaskScores; arguments as of `data.Evaluator.evaluate`."""
        return self._evaluator.evaluate(self._predict, self._score, advance, has_records)


def values(scores: dict) -> dict[str, float]:
    """Returns `eval/<task>/<metric>` -> float, and `eval/average` where several tasks have one."""
    found = {f"eval/{task}/{name}": value for task, of_task in scores.items()
             for name, value in of_task.metrics.items()}
    average = data.average(scores) if len(scores) > 1 else None
    return found if average is None else {**found, "eval/average": average}


def directions_of(scores: dict) -> dict[str, bool]:
    """Whether a lower value is better, of what `values` gives and whose name does not say so: name -> bool."""
    found = {f"eval/{task}/{name}": is_lower for task, of_task in scores.items()
             for name, is_lower in of_task.lower_is_better.items()}
    if found and all(found.values()):
        found["eval/average"] = True
    return {name: is_lower for name, is_lower in found.items() if is_lower != directions.is_lower_better(name)}
