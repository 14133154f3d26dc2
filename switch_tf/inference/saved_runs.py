"""Models of trained runs: from their `config.json`, without their gin files, and with the weights of a checkpoint."""

import dataclasses
import hashlib
import pathlib
import types
from typing import TYPE_CHECKING, Any

from switch_tf import data
from switch_tf.checkpoints import folders, run_config, tensors
from switch_tf.data import vocabularies
from switch_tf.data.task_catalog import fingerprint_of_vocabulary
from switch_tf.inference.text_model import TextModel
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.ops.dtypes import dtype_policy
from switch_tf.partitioning.partitioner import Partitioner
from switch_tf.refusals import Refusal

if TYPE_CHECKING:
    from switch_tf.decoding import Sampler


def from_config(saved: run_config.RunConfig, folder: str | pathlib.Path) -> types.SimpleNamespace | None:
    """Returns the run of a `config.json` on one device, None if only code can make its vocabulary.

    Neither the task nor its data are needed, and nothing in the folder is executed. The fields are those of a run from
    gin files that answering needs, `config`, `partitioner`, `run` and `make_model`, and `reading`, a data.Reading.

    Args:
        saved: Content of the `config.json`.
        folder: Run folder, which holds the copies of the vocabularies.
    """
    stored = {feature: vocabularies.Stored.from_data(fields) for feature, fields in saved.vocabularies.items()}
    if any(vocabulary.kind == vocabularies.OTHER for vocabulary in stored.values()):
        return None
    inputs, targets = (vocabularies.load(stored[feature], folder) for feature in ("inputs", "targets"))
    reading = data.Reading.from_data(saved.reading, inputs, targets)
    if (largest := max(vocabulary.size for vocabulary in stored.values())) > saved.model.vocab_size:
        raise Refusal(f"The model in {folder} has an embedding for {saved.model.vocab_size} ids, and its vocabulary "
                      f"has {largest}; config.json and the vocabulary are of different runs.")
    dtype = dtype_policy(saved.activation_dtype) if saved.activation_dtype else saved.dtype
    return types.SimpleNamespace(
        config=saved.model, partitioner=Partitioner(), reading=reading,
        run=types.SimpleNamespace(mixture_or_task_name=saved.task, task_feature_lengths=saved.task_feature_lengths),
        make_model=lambda: SwitchTransformer(saved.model, dtype=dtype))


def with_stored_vocabulary(described: Any, folder: str | pathlib.Path) -> Any:
    """Returns a run from gin files with the run folder's copy of its vocabulary, if task and vocabulary are the same.

    Args:
        described: Run from gin files.
        folder: Run folder with a `config.json`.
    """
    saved = run_config.read(folder)
    vocabulary, *others = {vocabularies.Stored.from_data(fields) for fields in saved.vocabularies.values()}
    run = described.run
    if others or run.mixture_or_task_name != saved.task or run.vocabulary not in (None, vocabulary.name):
        return described
    choice = vocabularies.choice_of(vocabulary, folder)
    return (dataclasses.replace(described, run=dataclasses.replace(run, vocabulary=choice)) if choice
            else described)


def load_text_model(described: Any, checkpoint: str | pathlib.Path, max_length: int | None = None,
                    sampler: "str | Sampler" = "greedy", batch_size: int | None = 32,
                    is_raw: bool = False) -> tuple[TextModel, dict]:
    """Loads the weights of a checkpoint into a model that answers texts.

    Args:
        described: From `from_config`, or a run from gin files on one device or under a layout of the pjrt back end.
        checkpoint: Checkpoint folder.
        max_length: Tokens to decode at most. None means the length of the run's targets.
        sampler, batch_size: See `TextModel`.
        is_raw: Whether texts are read without the conventions of the task, see `data.Reading.raw`.

    Returns:
        (TextModel, dict of everything besides the sampler that its answers depend on: step, hashes, lengths).

    Raises:
        BrokenCheckpoint: The checkpoint is damaged.
    """
    run, config = described.run, described.config
    folders.check_size(config, checkpoint)
    reading = getattr(described, "reading", None)
    if reading is None:
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
