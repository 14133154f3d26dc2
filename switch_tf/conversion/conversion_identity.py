"""All that determines the files of a conversion, by which one that was killed is recognised."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import switch_tf
from switch_tf.checkpoints import folders
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import formats, portions
from switch_tf.conversion.formats import Extras, Format
from switch_tf.storage import places


def of(source: pathlib.Path, source_format: Format, to: Format, output: pathlib.Path, config: SwitchConfig,
       extras: Extras) -> dict[str, Any]:
    """Returns the identity of a conversion, name -> value.

    Args:
        source: Folder of the weights.
        source_format: Its format.
        to: Format of the output.
        output: Folder of the output, whose hidden neighbours are not part of a source that holds it.
        config: Configuration of the model.
        extras: Other values for the output.
    """
    place = places.at(folders.resolve(source) if source_format is formats.SWITCH_TF else source).resolve()
    output = output.resolve()
    hidden = output.parent / f".{output.name}."
    return {"source": str(place), "state of the source": _sum(state(place, hidden)),
            "format": to.name, "configuration": _sum(dataclasses.asdict(config).items()),
            "expert_capacity": extras.expert_capacity, "dtype": extras.dtype,
            "vocabulary": _sum([extras.vocabulary]), "version of switch_tf": switch_tf.__version__,
            "size of a part": portions.LARGEST}


def _sum(values):
    return hashlib.sha256(json.dumps(list(values), default=repr).encode()).hexdigest()


def state(place: Any, hidden: Any = None) -> Iterator[tuple[str, int, float]]:
    """Yields path, size and time of each file in a folder, or of each file of a checkpoint such as model.ckpt-7.

    Args:
        place: Path.
        hidden: Beginning of the paths to leave out, or None.
    """
    is_folder = place.is_dir()
    entries = place.iterdir() if is_folder else (
        entry for entry in place.parent.iterdir() if entry.name.startswith(f"{place.name}."))
    for entry in sorted(entries):
        if hidden is not None and str(entry).startswith(str(hidden)):
            continue
        if entry.is_dir() and not places.is_link(entry):
            yield from state(entry, hidden)
        elif entry.is_file():
            yield str(entry), places.size(entry), places.modified(entry)
