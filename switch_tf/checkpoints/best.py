"""Keeps the best checkpoint of a run by a metric, and ends a run that no longer improves."""

from collections.abc import Iterable

from switch_tf.checkpoints import folders
from switch_tf.checkpoints.run_folder import RunFolder
from switch_tf.configs import directions
from switch_tf.configs.choices import nearest
from switch_tf.configs.run import Run
from switch_tf.refusals import Refusal


def check(best_metric: str, tasks: Iterable[str], declares_directions: bool) -> None:
    """Refuses a BEST_METRIC of a task that the run does not evaluate, or of unknown direction.

    A task's metric names are known only after an evaluation, see `Best.is_improved`.

    Args:
        best_metric: Such as "eval/<task>/<metric>".
        tasks: Tasks and mixtures that the run evaluates.
        declares_directions: Whether any metric declares its direction. Then the first evaluation decides.
    """
    tasks = list(dict.fromkeys(tasks))
    if not declares_directions:
        _is_lower_better(best_metric)
    if best_metric == "eval/average" or any(best_metric.startswith(f"eval/{task}/") for task in tasks):
        return
    metric = best_metric.rpartition("/")[2]
    raise Refusal(f"BEST_METRIC must be of a task that this run evaluates, {', '.join(tasks)}, not {best_metric!r}."
                  f"{nearest(best_metric, [f'eval/{task}/{metric}' for task in tasks])}")


def _is_lower_better(name, declared=None):
    is_lower = directions.is_lower_better(name, declared)
    if is_lower is None:
        raise Refusal(f"BEST_METRIC must be a metric of which it is known whether lower or higher is better, not "
                      f"{name!r}; give its function an attribute: metric.lower_is_better = False, or True.")
    return is_lower


class Best:
    """The best checkpoint so far, as recorded in `checkpoints/best.json`.

    `current`: A dict with "step", "metric" and "value", or None. Only finite values count.
    """

    def __init__(self, run: Run, folder: RunFolder):
        self._run = run
        self._folder = folder
        self._declared = {}
        self.current = self._named()

    def _named(self):
        best = folders.best(self._folder.checkpoints)
        return best if best and best["metric"] == self._run.best_metric else None

    def take_up(self, step: int, is_chief: bool) -> None:
        """Finds the best checkpoint of a resumed run from the evaluations and checkpoints on disk.

        A kill may have prevented the update of best.json, and its checkpoint may be damaged or gone.

        Args:
            step: The restored step.
            is_chief: Whether to correct best.json.
        """
        metric, checkpoints = self._run.best_metric, self._folder.checkpoints
        if metric is None:
            return
        records = self._folder.evaluations(step)
        self._declared.update(directions.declared_in(records))
        named = self._named()
        values = {named["step"]: named["value"]} if named else {}
        values |= {record["step"]: record[metric] for record in records
                   if folders.is_finite(record.get(metric))}
        # A declared direction is known from the first evaluation on.
        sign = 1 if len(values) > 1 and _is_lower_better(metric, self._declared) else -1
        candidates = [saved for saved in folders.steps(checkpoints) if saved in values and saved <= step]
        best = next((saved for saved in sorted(candidates, key=lambda saved: sign * values[saved])
                     if folders.is_whole(folders.path_of(checkpoints, saved))), None)
        self.current = None if best is None else {"step": best, "metric": metric, "value": values[best]}
        if is_chief and self.current != named:
            folders.set_best(checkpoints, **self.current or {})

    def is_improved(self, values: dict[str, float], declared: dict[str, bool] | None = None) -> bool:
        """Whether an evaluation is better than all earlier ones.

        Args:
            values: Logged name -> value.
            declared: Logged name -> whether lower is better, for metrics that declare it.
        """
        name = self._run.best_metric
        if name is None:
            return False
        if name not in values:
            reason = (" An average is written where several tasks have metrics, all of one direction."
                      if name == "eval/average" else "")
            raise Refusal(f"BEST_METRIC is {name!r}, but evaluations of this run write "
                          f"{', '.join(sorted(values))}.{reason}{nearest(name, values)}")
        self._declared.update(declared or {})
        sign, value = 1 if _is_lower_better(name, self._declared) else -1, values[name]
        return folders.is_finite(value) and (self.current is None or sign * value < sign * self.current["value"])

    def keep(self, step: int, values: dict[str, float], is_chief: bool) -> None:
        """Records the existing checkpoint of a step as the best."""
        name = self._run.best_metric
        self.current = {"step": step, "metric": name, "value": float(values[name])}
        if is_chief:
            folders.set_best(self._folder.checkpoints, **self.current)

    def reason_to_stop(self, step: int) -> str | None:
        """Returns why PATIENCE ends the run at this step, or None."""
        run = self._run
        if not run.patience or self.current is None:
            return None
        evaluations = (step - self.current["step"]) // run.eval_period
        if evaluations < run.patience:
            return None
        return (f"PATIENCE: {evaluations} evaluations were no better than {run.best_metric} "
                f"{self.current['value']:.4f} at step {self.current['step']}")
