"""Writes weights as a folder in Hugging Face's format, a portion at a time."""

import pathlib
from typing import Any

from switch_tf.conversion import huggingface_embeddings, huggingface_vocabulary, json_files, portions, safetensors_file
from switch_tf.conversion.rules import Link, Rule
from switch_tf.conversion.shards import DTYPES, Shards
from switch_tf.conversion.weight_source import WeightSource
from switch_tf.reporting import progress
from switch_tf.storage.resumable_folder import resumable_folder
from switch_tf.storage.whole_file import writing

_EMBEDDING = "token_embedder/embedding"


def write(source: WeightSource, links: list[Link], folder: pathlib.Path, values: dict[str, Any],
          vocabulary: bytes | None = None, identity: dict[str, Any] | None = None) -> None:
    """Writes config.json and model.safetensors. The folder appears complete or not at all.

    Args:
        source: Weights.
        links: Link of each weight to the names of its tensors.
        folder: Path of a folder that does not exist yet, or is empty.
        values: Content of config.json. Its "dtype" is that of the tensors.
        vocabulary: bytes or None. A SentencePiece model to write as spiece.model.
        identity: JSON-able. All that determines the files, to go on after a kill. None never goes on.

    Raises:
        Refusal: a weight cannot be read, or the folder cannot be written.
    """
    source, by_name = _with_copies(source, links)
    shapes = {name: by_name[weight].their_shape for weight in source.weights for name in by_name[weight].theirs}
    groups = portions.groups_of(source, lambda name: by_name[name].rule.is_divisible)
    num_bytes = safetensors_file.num_bytes(shapes.values(), DTYPES[values["dtype"]])
    with resumable_folder(folder.resolve(), "config.json", identity, num_bytes) as work:
        done = len(work.finished)
        with writing(folder):
            shards = Shards(work.folder, shapes, values["dtype"], work.finished[-1]["num_bytes"] if done else 0)
        with progress.bar(portions.num_bytes(groups), "writing", initial=portions.num_bytes(groups[:done])) as bar:
            for group in groups[done:]:
                for portion, weight in portions.read(source, group, bar):
                    with writing(folder):
                        for _, tensor in by_name[portion.name].to_theirs(weight, portion.rows):
                            shards.append(tensor)
                with writing(folder):
                    shards.sync()
                    work.finish({"num_bytes": shards.num_bytes})
        with writing(folder):
            shards.finish()
            json_files.write_object(work.folder / "config.json", values)
            if vocabulary is not None:
                (work.folder / huggingface_vocabulary.FILE).write_bytes(vocabulary)


def _with_copies(source, links):
    """Adds the other names of the embedding as weights, and returns the links of all weights by name."""
    names = huggingface_embeddings.copies(source.config)
    embedding = source.weights[_EMBEDDING]
    by_name = {link.ours: link for link in links} | {
        name: Link(name, embedding.shape, (name,), Rule(name, name)) for name in names}

    def read(name, rows):
        return source.read(_EMBEDDING if name in names else name, rows)

    return WeightSource(source.config, {**source.weights, **dict.fromkeys(names, embedding)}, read), by_name
