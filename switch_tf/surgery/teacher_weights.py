"""The weights of a teacher: a checkpoint of switch_tf, or a folder of another format that states its model."""

import functools
import hashlib
import json
import pathlib
import tempfile
from typing import Any

from switch_tf import checks, data
from switch_tf.checkpoints import folders, sizes, tensors
from switch_tf.configs.switch_config import SwitchConfig
from switch_tf.conversion import converting, formats, source_vocabulary
from switch_tf.conversion.formats import SWITCH_TF, Format
from switch_tf.conversion.initial_weights import Opened
from switch_tf.data.source_fingerprints import fingerprint_of_pieces
from switch_tf.models.switch_transformer import SwitchTransformer
from switch_tf.refusals import Refusal
from switch_tf.storage import places

_BUDGET = 256 * 2**20  # bytes to read of all files together for the identity


class TeacherWeights:
    """Weights that are looked for when they are first asked for.

    Args:
        folder: str. Run folder, for its newest checkpoint, checkpoint, or folder of any other format.
        argument: str. The argument that names the folder, for messages.

    Raises:
        Refusal: an argument is out of its range. Later: the folder holds no weights, or does not state its model.
    """

    def __init__(self, folder: str, argument: str):
        self._argument = argument
        self._folder = checks.place(argument, folder)

    @functools.cached_property
    def _found(self) -> tuple[Any, Format]:
        path, found = formats.locate(self._folder)
        if found is None:
            raise Refusal(f"{self._argument} must be a run folder with checkpoints, one checkpoint, or weights of "
                          f"Hugging Face, T5X or Mesh TensorFlow; {self._folder} is none of these.")
        return path, found

    @property
    def _format(self) -> Format:
        return self._found[1]

    @functools.cached_property
    def path(self) -> Any:
        """The checkpoint or the folder, the same one for as long as this object exists."""
        return self._format.resolve(self._found[0])

    @functools.cached_property
    def _description(self) -> dict[str, Any]:
        """The description of a checkpoint of switch_tf."""
        return folders.describe(self.path)

    @functools.cached_property
    def config(self) -> SwitchConfig:
        """Configuration of the model."""
        config = self._format.config_of(self.path)
        if config is None:
            raise Refusal(f"{self._argument} {self.path} is of {self._format.name} and does not describe its model; "
                          f"convert it first: switch-tf convert --input {self._folder} --output FOLDER "
                          "--gin_file=gin/models/NAME.gin")
        if self._format is SWITCH_TF:
            sizes.check(config, self.path)
        return config

    @functools.cached_property
    def identity(self) -> str:
        """A text that differs for any two checkpoints: the hash of their files, of large ones that of samples."""
        if self._format is SWITCH_TF:
            return folders.identity(self._description)
        start = str(self.path)
        files = [name.removeprefix(start) for name, _, _ in converting.state(self.path)]
        files = [file for file in files if all(map(self._format.is_needed, places.at(file).parts))]
        content = [(file, places.sample(start + file, _BUDGET // len(files))) for file in files]
        return f"{self._format.name}, {hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"

    @functools.cached_property
    def pieces(self) -> list[str] | None:
        """The pieces of the vocabulary as `continuation.record` has them, or None if they are not known."""
        if self._format is SWITCH_TF:
            return self._description["configuration"].get("pieces")
        found = source_vocabulary.find(self.path)
        if found.name is not None:
            return [fingerprint_of_pieces(data.get_vocabulary(found.name))]
        if found.content is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "spiece.model")
            file.write_bytes(found.content)
            return [fingerprint_of_pieces(data.get_vocabulary(str(file)))]

    @property
    def vocabulary(self) -> list[str] | None:
        """The vocabulary as `continuation.record` has it, or None if it is not known."""
        return self._description["configuration"].get("vocabulary") if self._format is SWITCH_TF else None

    def restore(self, model: SwitchTransformer) -> None:
        """Loads the weights into a built model of `config`, which may be under any layout."""
        variables = tensors.state_variables(model)
        if self._format is SWITCH_TF:
            tensors.restore(self.path, variables)
            return
        with self._format.at_hand(self.path) as local:
            tensors.start(Opened(self._format.module.open_weights(local, self.config), self.path), variables)
