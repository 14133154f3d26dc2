"""Configuration and tensors of a Hugging Face folder, without building the model or reading a tensor.

Nothing here imports Keras, so that `switch-tf inspect` takes one second.
"""

import dataclasses
import pathlib

from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import (
    checkpoint_files,
    huggingface_config,
    huggingface_embeddings,
    huggingface_ids,
    json_files,
)
from switch_tf.conversion.huggingface_embeddings import LOGITS
from switch_tf.conversion.huggingface_structure import T5X_LOGITS, read_structure
from switch_tf.refusals import Refusal


def read_folder(folder: pathlib.Path) -> tuple[SwitchConfig, dict[str, checkpoint_files.Tensor]]:
    """Returns the configuration of a model and its tensors by name, embedding and logits under one name each.

    Raises:
        Refusal: switch_tf cannot represent the model, or a file is missing, damaged or of another model.
    """
    values = _values(folder)
    family = huggingface_config.family(values)
    tensors = checkpoint_files.open_folder(folder)
    huggingface_embeddings.unify(tensors, huggingface_config.ties_logits(values, family))
    config = _config(folder, values, read_structure(tensors))
    if T5X_LOGITS in tensors and LOGITS not in tensors:
        tensors[LOGITS] = tensors.pop(T5X_LOGITS)
    return config, tensors


def read_config(folder: pathlib.Path) -> SwitchConfig:
    """Returns the configuration of a model. A folder without tensors needs config.json alone.

    Raises:
        Refusal: see `read_folder`.
    """
    if checkpoint_files.has_tensors(folder):
        return read_folder(folder)[0]
    values = _values(folder)
    return _config(folder, values, huggingface_config.stated_structure(values))


def _values(folder):
    if not (folder / "config.json").is_file():
        raise Refusal(f"{str(folder)!r} must be a folder on this machine with config.json and the tensors of a "
                      "model; a name on the Hugging Face hub is first downloaded with: hf download NAME "
                      "--local-dir FOLDER")
    return json_files.read_object(folder / "config.json")


def _config(folder, values, structure):
    generation = folder / "generation_config.json"
    end_id = huggingface_ids.end_id(values, json_files.read_object(generation) if generation.exists() else None)
    return dataclasses.replace(huggingface_config.from_hugging_face(values, structure), end_id=end_id)
