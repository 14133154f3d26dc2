"""Builds a run and starts it from its newest checkpoint."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import keras

from switch_tf import data, metrics
from switch_tf.checkpoints import best, continuation, folders, run_config, tensors
from switch_tf.checkpoints.checkpointer import Checkpointer
from switch_tf.checkpoints.run_folder import CONFIGURATION, RunFolder
from switch_tf.configs import policies
from switch_tf.configs.run import Run, StepSettings, check_periods
from switch_tf.data import task_catalog, vocabularies
from switch_tf.data.reading import reading_of
from switch_tf.decoding import check_decodes
from switch_tf.evaluation.objectives import Objective
from switch_tf.hardware import devices
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.dtypes import dtype_policy
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal, first_line
from switch_tf.reporting import summaries
from switch_tf.storage import whole_file
from switch_tf.training import processes, train_step
from switch_tf.training.loop import State, Training
from switch_tf.training.speed import Clock
from switch_tf.training.train_step import check_division, check_trainable

_KINDS = {"model": SwitchTransformer, "optimizer": keras.optimizers.Optimizer, "run": Run,
          "step_settings": StepSettings, "objective": Objective}


def check_parts(**parts: Any) -> None:
    """Raises Refusal unless each part has the type of its `Trainer` argument."""
    for name, part in parts.items():
        if not isinstance(part, _KINDS[name]):
            kind = _KINDS[name].__name__
            raise Refusal(f"Trainer.{name} must be {'an' if kind[0] in 'AEIO' else 'a'} {kind}, not {part!r}.")


class Trainer:
    """Trains a model from the newest checkpoint of its run folder to the last step.

    The constructor refuses invalid arguments before it compiles or writes.

    Args:
        model: Not built.
        partitioner: Defaults to one device.
        initial_weights: `conversion.formats.Opened` of the run's `initial_checkpoint`, to start from instead.
        activation_dtype: ACTIVATION_DTYPE of the model's policy, recorded in the run.
        objective: Defaults to `Objective()`, the cross-entropy of the targets.
    """

    def __init__(self, model: SwitchTransformer, optimizer: keras.optimizers.Optimizer, run: Run,
                 step_settings: StepSettings | None = None, partitioner: Partitioner | None = None,
                 initial_weights: Any = None, activation_dtype: str | None = None,
                 objective: Objective | None = None):
        step_settings, objective = step_settings or StepSettings(), objective or Objective()
        check_parts(model=model, optimizer=optimizer, run=run, step_settings=step_settings, objective=objective)
        self.model = model
        self.optimizer = optimizer
        self.run = run
        self.step_settings = step_settings
        self.partitioner = partitioner or Partitioner()
        self.objective = objective
        self._initial = initial_weights or run.initial_checkpoint
        self._activation_dtype = activation_dtype
        config, settings, task = model.config, step_settings, run.mixture_or_task_name
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
            raise Refusal("The trainer scales no loss, so its optimizer must have no loss_scale_factor, as this "
                          f"{type(optimizer).__name__} has; leave it out, and compute in bfloat16, which needs none.")
        data.check_vocabulary(task, config.vocab_size, run.vocabulary)
        check_periods(run, settings)
        if run.eval_period and run.best_metric:
            best.check(run.best_metric, [task, *data.names_of_tasks(task, "validation")],
                       data.declares_directions(task, "validation"))
        check_trainable(settings.trainable, config)
        self.partitioner.check(config, settings.steps_per_call, settings.use_xla)
        check_division(config, self.partitioner.layout, run.batch_size, run.task_feature_lengths,
                       settings.num_microbatches)
        trained = data.description_of_data(run, config, "train", run.seed)
        held_out = data.description_of_data(run, config, "validation", 0)
        self.configuration = continuation.record(
            config, run, settings, model.dtype_policy.name, optimizer, objective, data.fingerprint(trained),
            data.fingerprint(held_out) if run.eval_period else {}, data.vocabulary_fingerprint(task, run.vocabulary),
            data.pieces_fingerprint(task, run.vocabulary))
        objective.check(config, self.configuration)
        self._goes_on = _check_start(run, self.configuration, self._initial)
        data.check_examples(trained)
        if run.eval_period:
            data.check_examples(held_out)
            if data.has_metrics(task, "validation"):
                check_decodes(config)
        if run.shown_examples:
            data.check_examples(held_out)
            data.examples(held_out, 1)  # reads the texts; a cache has none
            check_decodes(config)

    def start(self, operative_config: str = "", progress: summaries.Progress | None = None,
              clock: Clock | None = None) -> Training:
        """Locks the run folder and prepares the next step. May be called once.

        Args:
            operative_config: Resolved configuration, written into the run folder.
            clock: Of the process. Defaults to a new one.

        Raises:
            Refusal: The folder is locked, or its checkpoints or another process have a different configuration.
        """
        run, partitioner, clock = self.run, self.partitioner, clock or Clock()
        clock.enter("start/build")
        lines = [line for line in operative_config.splitlines() if not line.startswith("#")]
        processes.agree(partitioner, {**self.configuration, "layout": dataclasses.asdict(partitioner.layout),
                                      "MODEL_DIR": str(run.model_dir), "the gin configuration": lines})
        folder = RunFolder(run.model_dir, is_owner=partitioner.is_chief)
        partitioner.barrier()  # until the folder is tidied up
        progress = progress or summaries.Progress(run.train_steps, is_shown=partitioner.is_chief)
        try:
            state = self._prepare(folder, progress.say, clock)
            if partitioner.is_chief:
                # Only now is this configuration known to match the folder.
                if operative_config:
                    whole_file.write_whole(folder.path / CONFIGURATION, operative_config)
                folder.remove_end()
                keep_config(folder.path, self.model, run, self._activation_dtype, progress.say)
                folder.cut_metrics(state.step if state.step else -1,
                                   ends_between=state.sums is not None and state.step < run.train_steps)
            progress.resume(state.step)
            return Training(state, run, self.step_settings, self.objective, partitioner, folder, progress, clock)
        except BaseException:
            progress.close()
            folder.discard()
            raise

    def _prepare(self, folder, say, clock):
        model, optimizer, run, settings, partitioner = (self.model, self.optimizer, self.run, self.step_settings,
                                                        self.partitioner)
        keras.utils.set_random_seed(run.seed)
        are_read = self._goes_on or self._initial is not None and run.initial_variables != "matching"
        partitioner.build(model, optimizer, lambda model: train_step.freeze(model, settings.trainable),
                          draws_weights=not are_read)
        self.objective.build(partitioner)
        self.objective.restore()
        frozen = "" if settings.trainable == "all" else f" ({_size(model.trainable_variables):,} of them trained)"
        say(f"{model.config.num_parameters:,} parameters{frozen}, {_size(optimizer.variables):,} numbers of optimizer "
            f"state; reading {run.mixture_or_task_name}" + ("" if devices.device_type() == "CPU" else
            f"; training on {partitioner.layout.num_devices} x {devices.device_name()}"))
        rows = partitioner.rows(run.batch_size)
        if not self._goes_on and run.cache_parts == 1 and sum(end - first for first, end in rows) < run.batch_size:
            say("every process reads the whole batch; with "
                f"CACHE_PARTS={run.batch_size // (rows[0][1] - rows[0][0])} each would read its own rows")
        with clock.counting("start/data"):
            batches = data.get_batches(data.description_of_data(run, model.config, "train", run.seed),
                                       settings.steps_per_call, rows, self.objective.added_features())
        checkpointer = Checkpointer(folder.checkpoints, tensors.state_variables(model, optimizer), batches, partitioner,
                                    run.keep_checkpoints, run.keep_every, self.configuration)
        state = State(model, optimizer, batches, checkpointer)
        with clock.counting("start/restore"):
            if not _resume(state, run, folder, self.configuration, say):
                if self._goes_on:
                    raise Refusal(f"The checkpoints of {run.model_dir} were removed while this run started; start it "
                                  "again.")
                if self._initial is not None:
                    _start(state, run, _opened(self._initial), say)
        return state

    def train(self, operative_config: str = "") -> dict:
        """Trains to the last step. Returns the result of `Training.finish`."""
        with self.start(operative_config) as training:
            training.advance(self.run.train_steps)
            return training.finish()


def _size(variables):
    return sum(variable.value.shape.num_elements() for variable in variables)


def _start(state, run, initial, say):
    variables = tensors.state_variables(state.model)
    if run.initial_variables == "with_optimizer":
        state.step = tensors.restore(initial.path, tensors.state_variables(state.model, state.optimizer))["step"]
        say(f"Starting from the weights and the optimizer of {run.initial_checkpoint}, step {state.step}, with the "
            "data from their beginning.")
        return
    new = tensors.start(initial, variables, is_matching=run.initial_variables == "matching")
    step = initial.description["step"]
    if run.initial_variables == "all":
        say(f"Starting from the weights of {run.initial_checkpoint}, step {step}.")
        return
    num_new, total = _size(variables[path] for path in new), _size(variables.values())
    rest = f"; the others are new: {', '.join(path.removeprefix('model/') for path in new)}" if new else ""
    say(f"Starting from {total - num_new:,} of {total:,} weights from {run.initial_checkpoint}, step "
        f"{step}{rest}.")


def _resume(state, run, folder, configuration, say):
    """Restores the newest readable checkpoint. Returns False if there is no checkpoint."""
    broken = []

    def pass_over(path, error):
        say(f"{error} Trying the one before it.")
        broken.append(path)

    for path, description, changes, restarts_data in _candidates(run, configuration, pass_over):
        step, sums = description["step"], description["pending_metrics"]
        try:
            try:
                sums = sums and metrics.from_json(sums)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise folders.BrokenCheckpoint(
                    f"{path} has no readable checkpoint.json ('pending_metrics' is damaged).") from error
            state.checkpointer.restore(path, restarts_data)
        except folders.BrokenCheckpoint as error:
            pass_over(path, error)
            continue
        for newer in broken if folder.is_owner else ():
            say(f"{newer} is kept as {folders.set_aside(newer)}.")
        say(f"Going on from step {step} ({path}).")
        for line in changes:
            say(line)
        if step >= run.train_steps:
            say(f"This run is at step {step} already and TRAIN_STEPS is {run.train_steps}, so nothing is left to "
                "train; a larger TRAIN_STEPS goes on.")
        state.step, state.sums = step, sums
        return True
    if broken:
        raise Refusal(f"No checkpoint in {str(folder.checkpoints)!r} can be read; restore it from a copy, or use "
                      "another MODEL_DIR to start anew.")
    return False


def _candidates(run, configuration, on_broken=lambda path, error: None):
    """Yields the checkpoints that a run may resume from, newest first. Refuses another configuration.

    Each is (folder, contents of its `checkpoint.json`, lines about changes of the configuration, whether to restart the
    data). Lazy, because older checkpoints matter only after damaged ones.
    """
    for path, description in folders.described(folders.checkpoints_of(run.model_dir), on_broken):
        saved = description["configuration"]
        changes, restarts_data = continuation.check(saved, configuration, path, run.restart_changed_data,
                                                    _vocabularies(run, saved, configuration, path))
        yield path, description, changes, restarts_data


def _opened(initial):
    return tensors.InitialWeights(initial) if isinstance(initial, str | pathlib.Path) else initial


def _check_start(run, configuration, initial):
    """Returns whether a run resumes. Refuses one that can neither resume nor start from `initial`."""
    if next(_candidates(run, configuration), None) is not None:
        return True
    if initial is None:
        return False
    initial = _opened(initial)
    description = initial.description
    saved = description["configuration"]
    if run.initial_variables == "with_optimizer":
        if not any(name.startswith("optimizer/") for name in description["variables"]):
            raise Refusal(f"Run.initial_variables is 'with_optimizer', and {run.initial_checkpoint} holds weights "
                          "alone; convert them anew with --with_optimizer, or leave Run.initial_variables out.")
        if description["step"] >= run.train_steps:
            raise Refusal(f"{run.initial_checkpoint} is at step {description['step']} and TRAIN_STEPS is "
                          f"{run.train_steps}, the last step of the run; give a larger TRAIN_STEPS.")
    continuation.check_weights(saved, configuration, run.initial_checkpoint,
                               _vocabularies(run, saved, configuration, initial.path), run.initial_variables)
    return False


def _vocabularies(run, saved, configuration, checkpoint):
    """Describes the vocabularies of a checkpoint's run and of this run, with fingerprints.

    None if they are equal, or the checkpoint's run folder has no `config.json`.
    """
    fingerprints, folder = saved.get("vocabulary", []), checkpoint.parent.parent
    if fingerprints == configuration["vocabulary"] or not run_config.is_in(folder):
        return None
    try:
        stored = [vocabularies.Stored.from_data(kept) for kept in run_config.read(folder).vocabularies.values()]
    except ValueError:  # damaged, so only the fingerprint is known
        return None
    names = " and ".join(repr(vocabulary.name) for vocabulary in dict.fromkeys(stored))
    files = " and ".join(dict.fromkeys(f"{folder / vocabulary.file}" for vocabulary in stored if vocabulary.file))
    before = f"{names} ({'; '.join(map(str, fingerprints))}{f'; the copy of the run is {files}' * bool(files)})"
    features = vocabularies.get_provider(run.mixture_or_task_name, run.vocabulary).output_features
    by_fingerprint = {task_catalog.fingerprint_of_vocabulary(feature.vocabulary): feature.vocabulary
                      for feature in features.values()}
    return before, " and ".join(f"{run.vocabulary or vocabularies.name_of(vocabulary)!r} ({fingerprint})"
                                for fingerprint, vocabulary in sorted(by_fingerprint.items()))


def keep_config(folder: pathlib.Path, model: SwitchTransformer, run: Run, activation_dtype: str | None,
                say: Callable[[str], None]) -> None:
    """Copies the vocabularies of a run into its folder, then writes `config.json`, for use of the model.

    A model with the user's own class or dtype, or a task without inputs or targets, is described by the gin file only.
    A failure to write is printed. A foreign `config.json`, such as a Hugging Face model's, stays.
    """
    try:
        if run_config.is_foreign(folder):
            raise Refusal("the one there is not a run's, and stays")
        features = vocabularies.get_provider(run.mixture_or_task_name, run.vocabulary).output_features
        dtype, config = model.dtype_policy.name, model.config
        if (type(model) is not SwitchTransformer or dtype not in run_config.DTYPES
                or not features.keys() >= run_config.FEATURES):
            whole_file.remove(folder / run_config.FILE)
            return
        if activation_dtype not in run_config.ACTIVATION_DTYPES or dtype_policy(activation_dtype) != dtype:
            activation_dtype = None
        copies: dict[str, dict] = {}
        for feature in ("inputs", "targets"):
            vocabulary = features[feature].vocabulary
            if copies and vocabulary == features["inputs"].vocabulary:  # one file for both
                copies[feature] = copies["inputs"]
                continue
            try:
                stored = vocabularies.store(vocabulary, folder, feature, run.vocabulary)
            except vocabularies.Unreadable as error:  # readable when the run was checked
                say(f"{error} Commands on this run will read it from there.")
                stored = vocabularies.Stored(vocabularies.OTHER, vocabulary.sentencepiece_model_file,
                                             vocabulary.vocab_size)
            copies[feature] = stored._asdict()
        homes = {name: policies.get(name).place for name in {config.routing_policy, config.decoder_policy}}
        run_config.write(folder, run_config.RunConfig(
            config, dtype, activation_dtype, run.mixture_or_task_name, dict(run.task_feature_lengths),
            reading_of(run.mixture_or_task_name, run.vocabulary).as_data(), copies,
            {name: place for name, place in homes.items() if not place.startswith("switch_tf.")}))
    except (OSError, Refusal) as error:
        say(f"{folder} keeps no {run_config.FILE} of the run ({first_line(error)}), so commands on this run need its "
            "gin file, its tasks and its vocabulary.")
