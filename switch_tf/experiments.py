"""Experiments on devices, and their trainers."""

import contextlib
import dataclasses
from collections.abc import Sequence

from switch_tf.checkpoints import folders, run_folder, vocabulary_choice
from switch_tf.configs.experiment import Experiment
from switch_tf.conversion import formats
from switch_tf.evaluation.split_evaluator import CheckpointEvaluator
from switch_tf.inference import saved_runs
from switch_tf.partitioning import backends
from switch_tf.partitioning.layout import choose
from switch_tf.refusals import Refusal
from switch_tf.reporting import summaries
from switch_tf.storage import outputs, places
from switch_tf.training import processes
from switch_tf.training.train_step import check_division
from switch_tf.training.trainer import Trainer


def place_here(described: Experiment, is_checked: bool = True, num_cpus: int = 1) -> Experiment:
    """Returns an experiment on the devices of all processes that train together.

    Starts the devices. With several processes, call it before any TensorFlow operation.

    Args:
        num_cpus: CPU devices of an experiment without a layout, on a machine without accelerators.
    """
    processes.say_who_is_awaited()
    if described.layout.is_auto:
        described = _choose_layout(described, backends.count_accelerators(described.layout.backend) or num_cpus)
    partitioner = backends.create_partitioner(described.layout)
    # Not in the run folder, which may be a stranger's: programs run.
    if not places.is_local(described.run.model_dir):
        partitioner.keep_programs(f"{places.root(described.run.model_dir)}/switch_tf/xla")
    return _place(described, partitioner.layout, partitioner, is_checked)


def place_on_devices(described: Experiment, num_devices: int, kind: str, is_checked: bool = True) -> Experiment:
    """Returns an experiment on a number of devices of another machine."""
    described = _choose_layout(described, num_devices)
    return _place(described, described.layout.resolve(num_devices, kind), None, is_checked)


def _choose_layout(described, num_devices):
    """Returns an experiment with a layout, which is recorded as if the user had named it."""
    if not described.layout.is_auto or num_devices == 1:
        return described
    file, layout = choose(num_devices, described.config)
    outputs.say(f"No layout is named, so {num_devices} devices use {file}, mesh "
                f"{layout.resolve(num_devices, '').mesh_shape}.")
    return dataclasses.replace(described, layout=dataclasses.replace(layout, backend=described.layout.backend))


def _place(described, layout, partitioner, is_checked):
    if described.gin is not None:
        described.gin.bind_others()
    described = dataclasses.replace(described, gin=described.as_gin(), layout=layout, partitioner=partitioner)
    if described.config is None:
        described = dataclasses.replace(described, config=described.make_model().config)
    if is_checked:
        check_division(described.config, layout, described.run.batch_size, described.run.task_feature_lengths,
                       described.settings.num_microbatches)
    return described


def make_trainer(described: Experiment, words: Sequence[str] = ("train",)) -> tuple[Trainer, str]:
    """Makes an experiment's trainer, with the vocabulary that its initial weights need, and the configuration's text.

    `words` are arguments of `switch-tf`.
    """
    weights = formats.opened(described.run, described.config)
    described = dataclasses.replace(described, run=dataclasses.replace(
        described.run, vocabulary=vocabulary_choice.choose(described.run)))
    trainer = Trainer(described.make_model(), described.make_optimizer(), described.run, described.settings,
                      described.partitioner, weights, described.activation_dtype, described.make_objective())
    return trainer, summaries.origin(words, trainer.model.config) + described.as_gin().text()


def train(described: Experiment) -> dict:
    """Trains on this machine's devices (`Experiment.train`)."""
    trainer, configuration = make_trainer(place_here(described))
    return trainer.train(configuration)


def evaluate(described: Experiment, step: str, split: str, num_examples: int | None) -> dict:
    """Scores a checkpoint of a run (`Experiment.evaluate`)."""
    if step == "all":
        raise Refusal("step must be best, last or a step with a checkpoint, not 'all', because one is evaluated.")
    folder = places.at(described.run.model_dir)
    (checkpoint,) = run_folder.select(folder, step)
    described = place_here(described, is_checked=False)
    described = saved_runs.use_stored_vocabulary(described, folder)
    folders.check_size(described.config, checkpoint)
    with contextlib.closing(CheckpointEvaluator(described, split, num_examples, folder / "eval")) as evaluator:
        return evaluator.evaluate(checkpoint)
