"""The best checkpoint of a run, by what its evaluations write under one name, and when to wait for no better one."""

from switch_tf.choices import nearest
from switch_tf.training import checkpoint_folders, names


class UnknownMetric(Exception):
    """No evaluation of this run writes what BEST_METRIC names."""


class Best:
    """What `checkpoints/best.json` remembers; where a run has no best_metric, nothing is ever better.

    Args:
        run: Run.
        folder: RunFolder.
    """

    def __init__(self, run, folder):
        self._run = run
        self._folder = folder.checkpoints
        found = checkpoint_folders.best(self._folder)
        # Another metric's best says nothing of this one's.
        self.found = found if found and found["metric"] == run.best_metric else None

    def is_improved(self, values: dict[str, float]) -> bool:
        """Whether an evaluation is better than all before it.

        Raises:
            UnknownMetric: it has no such value; the nearest names are told.
        """
        name = self._run.best_metric
        if name is None:
            return False
        if name not in values:
            raise UnknownMetric(f"BEST_METRIC is {name!r}, but evaluations of this run write "
                                f"{', '.join(sorted(values))}.{nearest(name, values)}")
        if self.found is None:
            return True
        before, now = self.found["value"], values[name]
        return now < before if names.is_better_low(name) else now > before

    def keep(self, step: int, values: dict[str, float], is_chief: bool) -> None:
        """Remembers the checkpoint of a step, which is there, as the best one."""
        name = self._run.best_metric
        self.found = {"step": step, "metric": name, "value": values[name]}
        if is_chief:
            checkpoint_folders.set_best(self._folder, **self.found)

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
