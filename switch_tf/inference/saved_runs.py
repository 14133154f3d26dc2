"""Models of trained runs: from their `config.json`, without their gin files, and with the weights of a checkpoint."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from switch_tf import data
from switch_tf.checkpoints import folders, run_config, tensors
from switch_tf.data import stored_vocabularies
from switch_tf.data.source_fingerprints import fingerprint_of_vocabulary
from switch_tf.inference.text_model import TextModel
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.dtypes import dtype_policy
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal

if TYPE_CHECKING:
    from switch_tf.decoding import Sampler


class SavedTask(NamedTuple):
    """The task of a run, `mixture_or_task_name`, and its `task_feature_lengths`, a dict of tokens."""

    mixture_or_task_name: str
    task_feature_lengths: dict


class SavedRun(NamedTuple):
    """A run as its `config.json` describes it, on one device. Its fields are named as those of a run from gin files.

    `config`: SwitchConfig; `run`: SavedTask; `reading`: data.Reading; `make_model`: function to a new
    SwitchTransformer.
    """

    config: Any
    partitioner: Partitioner
    run: SavedTask
    reading: Any
    make_model: Callable[[], SwitchTransformer]


def from_config(saved: run_config.RunConfig, folder: str | pathlib.Path) -> SavedRun | None:
    """Returns the run of a `config.json`, None if only code can make its vocabulary.

    Neither the task nor its data are needed, and nothing in the folder is executed.

    Args:
        saved: Content of the `config.json`.
        folder: Run folder, which holds the copies of the vocabularies.

    Raises:
        Refusal: A copy of a vocabulary is damaged or belongs to another run.
    """
    stored = {feature: stored_vocabularies.Stored.from_data(fields) for feature, fields in saved.vocabularies.items()}
    if any(vocabulary.kind == stored_vocabularies.OTHER for vocabulary in stored.values()):
        return None
    inputs, targets = (stored_vocabularies.load(stored[feature], folder) for feature in ("inputs", "targets"))
    reading = data.Reading.from_data(saved.reading, inputs, targets)
    if (largest := max(vocabulary.size for vocabulary in stored.values())) > saved.model.vocab_size:
        raise Refusal(f"The model in {folder} has an embedding for {saved.model.vocab_size} ids, and its vocabulary "
                      f"has {largest}; config.json and the vocabulary are of different runs.")
    dtype = dtype_policy(saved.activation_dtype) if saved.activation_dtype else saved.dtype
    return SavedRun(saved.model, Partitioner(), SavedTask(saved.task, saved.task_feature_lengths), reading,
                    lambda: SwitchTransformer(saved.model, dtype=dtype))


def with_stored_vocabulary(described: Any, folder: str | pathlib.Path) -> Any:
    """Returns a run from gin files with the run folder's copy of its vocabulary, if task and vocabulary are the same.

    Args:
        described: Run from gin files.
        folder: Run folder with a `config.json`.

    Raises:
        Refusal: `config.json` is damaged.
    """
    saved = run_config.read(folder)
    vocabulary, *others = {stored_vocabularies.Stored.from_data(fields) for fields in saved.vocabularies.values()}
    run = described.run
    if others or run.mixture_or_task_name != saved.task or run.vocabulary not in (None, vocabulary.name):
        return described
    choice = stored_vocabularies.choice_of(vocabulary, folder)
    return (dataclasses.replace(described, run=dataclasses.replace(run, vocabulary=choice)) if choice
            else described)


def load_text_model(described: Any, checkpoint: str | pathlib.Path, max_length: int | None = None,
                    sampler: "str | Sampler" = "greedy", batch_size: int | None = 32,
                    is_raw: bool = False) -> tuple[TextModel, dict]:
    """Loads the weights of a checkpoint into a model that answers texts.

    Args:
        described: SavedRun, or a run from gin files on one device or under a layout of the pjrt back end.
        checkpoint: Checkpoint folder.
        max_length: Tokens to decode at most. None means the length of the run's targets.
        sampler, batch_size: See `TextModel`.
        is_raw: Whether texts are read without the conventions of the task, see `data.Reading.raw`.

    Returns:
        (TextModel, dict of everything besides the sampler that its answers depend on: step, hashes, lengths).

    Raises:
        BrokenCheckpoint: The checkpoint is damaged.
        Refusal: The checkpoint or the vocabulary belongs to another model.
    """
    run, config = described.run, described.config
    folders.check_size(config, checkpoint)
    if isinstance(described, SavedRun):
        reading = described.reading
    else:
        data.check_task(run.mixture_or_task_name)
        data.check_vocabulary(run.mixture_or_task_name, config.vocab_size, run.vocabulary)
        reading = data.reading_of(run.mixture_or_task_name, run.vocabulary)
    model = described.make_model()
    described.partitioner.build(model)
    text_model = TextModel(model, reading.raw() if is_raw else reading, run.task_feature_lengths["inputs"],
                           max_length or run.task_feature_lengths["targets"], sampler, batch_size,
                           described.partitioner)
    step = tensors.restore(checkpoint, tensors.state_variables(model))["step"]
    description = f"{config!r} {model.dtype_policy.name}"
    return text_model, {
        "step": step, "weights": folders.hash_of_weights(checkpoint),
        "model": hashlib.sha256(description.encode()).hexdigest(),
        "vocabulary": sorted({fingerprint_of_vocabulary(vocabulary)
                              for vocabulary in (reading.inputs, reading.targets)}),
        "reading": text_model.features.as_data(),
        "inputs_length": text_model.inputs_length, "max_length": text_model.max_length}
