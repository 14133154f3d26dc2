"""The best checkpoint of a run by one value of its evaluations, and when to stop waiting for a better one."""

from collections.abc import Iterable

from switch_tf.checkpoints import folders
from switch_tf.configs import directions
from switch_tf.configs.choices import nearest
from switch_tf.refusals import Refusal


def check_task(best_metric: str, tasks: Iterable[str]) -> None:
    """Refuses a BEST_METRIC of a task that is not among those whose evaluations a run writes, before it starts.

    Which metrics a task has is known only when they have been computed; see `Best.is_improved`.

    Raises:
        Refusal: names the tasks.
    """
    tasks = list(dict.fromkeys(tasks))
    if best_metric == "eval/average" or any(best_metric.startswith(f"eval/{task}/") for task in tasks):
        return
    metric = best_metric.rpartition("/")[2]
    raise Refusal(f"BEST_METRIC must be of a task that this run evaluates, {', '.join(tasks)}, not {best_metric!r}."
                  f"{nearest(best_metric, [f'eval/{task}/{metric}' for task in tasks])}")


class Best:
    """The best checkpoint so far, which `checkpoints/best.json` names. Without a best_metric nothing is ever better.

    A value that is not finite is never better than another one, and never the best. PATIENCE counts from the best
    evaluation, so it begins with the first finite value: a run that has none trains to its last step.

    Args:
        run: Run.
        folder: RunFolder.
    """

    def __init__(self, run, folder):
        self._run = run
        self._folder = folder
        self._declared = {}
        self.found = self._named()

    def _named(self):
        """Returns the contents of best.json, or None if they are of another metric."""
        found = folders.best(self._folder.checkpoints)
        return found if found and found["metric"] == self._run.best_metric else None

    def take_up(self, step: int, is_chief: bool) -> None:
        """Finds the best checkpoint of a resumed run, from the evaluations and checkpoints on disk.

        A kill or a full disk may have come between a checkpoint and best.json, and the checkpoint that it names may be
        damaged or gone: then the best of the others is the best.

        Args:
            step: int. The step that was restored.
            is_chief: bool. Whether to mend best.json as well.

        Raises:
            Refusal: metrics.jsonl cannot be read, or best.json not written.
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
        sign = 1 if directions.is_lower_better(metric, self._declared) else -1
        there = [(sign * values[saved], saved) for saved in folders.steps(checkpoints)
                 if saved in values and saved <= step]
        best = next((saved for _, saved in sorted(there)
                     if folders.is_whole(folders.path_of(checkpoints, saved))), None)
        self.found = None if best is None else {"step": best, "metric": metric, "value": values[best]}
        if not is_chief or self.found == named:
            return
        if self.found:
            folders.set_best(checkpoints, **self.found)
        else:
            folders.unset_best(checkpoints)

    def is_improved(self, values: dict[str, float], declared: dict[str, bool] | None = None) -> bool:
        """Whether an evaluation is better than all before it.

        Args:
            values: name -> what an evaluation writes under it.
            declared: name -> whether a lower value is better, of the metrics that declare it.

        Raises:
            Refusal: it has no such value; the message has the nearest names.
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
        now = values[name]
        if not folders.is_finite(now):
            return False
        if self.found is None:
            return True
        before = self.found["value"]
        return now < before if directions.is_lower_better(name, self._declared) else now > before

    def keep(self, step: int, values: dict[str, float], is_chief: bool) -> None:
        """Makes the existing checkpoint of a step the best one.

        Raises:
            Refusal: best.json cannot be written.
        """
        name = self._run.best_metric
        self.found = {"step": step, "metric": name, "value": float(values[name])}
        if is_chief:
            folders.set_best(self._folder.checkpoints, **self.found)

    def reason_to_stop(self, step: int) -> str | None:
        """Why a run at this step should end; None where it should go on."""
        run = self._run
        if not run.patience or self.found is None:
            return None
        evaluations = (step - self.found["step"]) // run.eval_period
        if evaluations < run.patience:
            return None
        return (f"PATIENCE: {evaluations} evaluations were no better than {run.best_metric} {self.found['value']:.4f} "
                f"at step {self.found['step']}")
