"""Writes a run for TensorBoard, with equal tags in `events/train` and `events/eval`, which share a chart."""

import pathlib

import numpy as np
import tensorflow as tf

from switch_tf.checkpoints.run_folder import CONFIGURATION, RunFolder

_BUCKETS = 30


class Events:
    """Writes the values of a run, and its configuration as text, for TensorBoard.

    Training values go to the folder `train` and evaluations to `eval`, without the first part of their names:
    "train/loss" and "eval/<mixture>/loss" both become "loss". Tasks of a mixture keep their name: "<task>/loss". An
    array, such as the load of a layer's experts, becomes one histogram.

    Args:
        folder: RunFolder.
        events: path of the folder for both, `events/` of the run or a local copy of it.
    """

    def __init__(self, folder: RunFolder, events: pathlib.Path):
        self._folder, self._events = folder, events
        self._writers = {}

    def write(self, step: int, values: dict) -> None:
        """Writes values by their names in metrics.jsonl. In an evaluation the whole mixture comes first.

        Raises:
            tf.errors.OpError: a file cannot be written.
        """
        mixture = next((name.split("/")[1] for name in values if name.startswith("eval/") and name.count("/") > 1), "")
        for name, value in values.items():
            kind, tags = _tags(name, mixture)
            with self._writer(kind, step).as_default(step=step):
                for tag in tags:
                    if isinstance(value, list):
                        array = np.asarray(value, np.float32)
                        tf.summary.histogram(tag, array[np.isfinite(array)], buckets=_BUCKETS)
                    else:
                        tf.summary.scalar(tag, value)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, kind, step):
        if kind not in self._writers:
            self._writers[kind] = tf.summary.create_file_writer(str(self._events / kind))
            configuration = self._folder.path / CONFIGURATION
            if kind == "train" and configuration.exists():
                with self._writers[kind].as_default(step=step):
                    text = configuration.read_text()
                    tf.summary.text("configuration", "\n".join(f"    {line}" for line in text.splitlines()))
        return self._writers[kind]


def _tags(name, mixture):
    """Returns the folder of a value, and its tags there."""
    if not name.startswith("eval/"):
        return "train", [name.removeprefix("train/")]
    tag = name.removeprefix("eval/").removeprefix(f"{mixture}/")
    # The held-out loss is the cross-entropy alone, and training has both.
    return "eval", [tag, tag.removesuffix("loss") + "cross_entropy"] if tag.split("/")[-1] == "loss" else [tag]
