"""A run from its description: what cannot work is refused, and the rest is started where its folder stands."""

from switch_tf import data
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.training import checkpoint_folders, summaries
from switch_tf.training.loop import Training
from switch_tf.training.run import StepSettings, check_division, check_periods
from switch_tf.training.run_folder import RunFolder
from switch_tf.training.state import prepare


class Trainer:
    """Trains a model, from wherever its run folder stands to the last step.

    Everything that can be wrong with the arguments is refused here, before anything is compiled or written.

    Args:
        model: SwitchTransformer, not built.
        optimizer: Keras optimizer.
        run: Run.
        step_settings: StepSettings.
        partitioner: Partitioner, by default of one device.
    """

    def __init__(self, model, optimizer, run, step_settings=None, partitioner=None):
        self.model = model
        self.optimizer = optimizer
        self.run = run
        self.step_settings = step_settings or StepSettings()
        self.partitioner = partitioner or Partitioner()
        self._check()

    def _check(self):
        run, config, settings = self.run, self.model.config, self.step_settings
        data.check_task(run.mixture_or_task_name)
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size)
        check_periods(run, settings)
        self.partitioner.check(config.num_parameters, settings.steps_per_call, settings.use_xla)
        check_division(config, self.partitioner.layout, run.batch_size, run.task_feature_lengths,
                       settings.num_microbatches)
        if run.initial_checkpoint is not None:
            checkpoint_folders.describe(checkpoint_folders.resolve(run.initial_checkpoint))

    def start(self, operative_config: str = "") -> Training:
        """Takes the run folder and makes everything ready for the next step; to be called once.

        Args:
            operative_config: text that is kept in the run folder, the resolved configuration.

        Raises:
            ValueError: another process has the folder, or what it holds is of another configuration.
        """
        run, partitioner = self.run, self.partitioner
        folder = RunFolder(run.model_dir, is_owner=partitioner.is_chief)
        partitioner.barrier()  # the others look into the folder only when it has been tidied up
        progress = summaries.Progress(0, run.train_steps, is_shown=partitioner.is_chief)
        try:
            state = prepare(self.model, self.optimizer, run, self.step_settings, partitioner, folder, progress.say)
            if partitioner.is_chief:
                # Only now is it certain that this configuration belongs to what the folder holds.
                if operative_config:
                    (folder.path / "operative_config.gin").write_text(operative_config)
                folder.cut_metrics(state.step if state.step else -1,
                                   ends_between=state.sums is not None and state.step < run.train_steps)
            progress.advance(state.step)
            return Training(state, run, self.step_settings, partitioner, folder, progress)
        except BaseException:
            progress.close()
            folder.close()
            raise

    def train(self, operative_config: str = "") -> dict:
        """Runs to the last step; returns what `Training.finish` does."""
        with self.start(operative_config) as training:
            training.advance(self.run.train_steps)
            return training.finish()
