"""The mean of the weights of several checkpoints of a run, computed in float64, a portion at a time."""

import pathlib

import numpy as np

import switch_tf
from switch_tf.checkpoints import folders
from switch_tf.conversion import own, source_vocabulary, weight_source
from switch_tf.conversion.formats import start_from
from switch_tf.conversion.weight_source import WeightSource


def open_mean(checkpoints: list[pathlib.Path]) -> WeightSource:
    """Returns the mean of the weights of checkpoints that `sources.check_same` accepted."""
    opened = [own.open_weights(checkpoint) for checkpoint in checkpoints]
    weights = opened[-1].weights

    def read(name, rows):
        total = sum((one.read(name, rows) for one in opened), np.zeros((), np.float64))
        return (total / len(opened)).astype(weights[name].dtype)

    return WeightSource(opened[-1].config, weights, read)


def average_run(run_folder: pathlib.Path, checkpoints: list[pathlib.Path], output: pathlib.Path) -> tuple[dict, str]:
    """Writes the mean of the weights of checkpoints of a run. After a kill, the same call goes on.

    Args:
        run_folder: Run folder, whose vocabulary goes along.
        checkpoints: Its checkpoint folders, oldest first, of one model.
        output: New or empty folder.

    Returns:
        (JSON object, text for people).
    """
    mean, vocabulary = open_mean(checkpoints), source_vocabulary.find(run_folder)
    identity = {"mean of": [folders.identity(folders.describe(checkpoint)) for checkpoint in checkpoints],
                "version of switch_tf": switch_tf.__version__, "size of a part": weight_source.LARGEST}
    own.write_weights(mean, output, vocabulary.content, identity)
    name, lines = start_from(output, vocabulary)
    steps = [int(checkpoint.name.removeprefix("step_")) for checkpoint in checkpoints]
    result = {"run": str(run_folder), "steps": steps, "output": str(output),
              "num_parameters": mean.config.num_parameters, "vocabulary": name}
    shown = f"{', '.join(map(str, steps[:-1]))} and {steps[-1]}"
    text = f"{mean.config.num_parameters:,} parameters in {output}, the mean of steps {shown} of {run_folder}."
    return result, "\n".join([text, *lines])
