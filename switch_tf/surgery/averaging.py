"""The mean of the weights of several checkpoints of a run, computed in float64, one tensor at a time."""

import math
import pathlib

import numpy as np

from switch_tf.checkpoints import sizes, tensors
from switch_tf.checkpoints.stored_weights import StoredWeights
from switch_tf.conversion import own, source_vocabulary
from switch_tf.conversion.converting import start_from
from switch_tf.conversion.linked_weights import check_memory
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.reporting import progress
from switch_tf.surgery import sources


def average(checkpoints: list[pathlib.Path]) -> SwitchTransformer:
    """Returns a model with the mean of the weights of checkpoints of one model.

    Args:
        checkpoints: Checkpoint folders.

    Raises:
        BrokenCheckpoint: A checkpoint is damaged.
        Refusal: The checkpoints are of different models.
    """
    sources.check_same(checkpoints)
    config = sources.recorded_config(checkpoints[-1])
    for checkpoint in checkpoints:
        sizes.check(config, checkpoint)
    check_memory(config)
    model = SwitchTransformer(config)
    model.build()
    opened = [StoredWeights(checkpoint) for checkpoint in checkpoints]
    with progress.bar(4 * config.num_parameters * len(opened), "averaging") as bar:
        for path, variable in tensors.state_variables(model).items():
            total = np.zeros(variable.shape)
            for weights in opened:
                total += weights.read(path)
                bar.update(4 * math.prod(variable.shape))
            variable.assign((total / len(opened)).astype(variable.dtype))
    return model


def average_run(run_folder: pathlib.Path, checkpoints: list[pathlib.Path], output: pathlib.Path) -> tuple[dict, str]:
    """Writes the mean of the weights of checkpoints of a run.

    Args:
        run_folder: Run folder, whose vocabulary goes along.
        checkpoints: Its checkpoint folders, oldest first.
        output: New or empty folder.

    Returns:
        (JSON object, text for people).

    Raises:
        Refusal: The checkpoints are damaged or of different models, or the folder cannot be written.
    """
    model, vocabulary = average(checkpoints), source_vocabulary.find(run_folder)
    own.to_switch_tf(model, output, vocabulary.content)
    name, lines = start_from(output, vocabulary)
    steps = [int(checkpoint.name.removeprefix("step_")) for checkpoint in checkpoints]
    result = {"run": str(run_folder), "steps": steps, "output": str(output),
              "num_parameters": model.config.num_parameters, "vocabulary": name}
    shown = f"{', '.join(map(str, steps[:-1]))} and {steps[-1]}"
    text = f"{model.config.num_parameters:,} parameters in {output}, the mean of steps {shown} of {run_folder}."
    return result, "\n".join([text, *lines])
